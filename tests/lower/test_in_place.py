"""State is written in place where that is safe, after its last reader, and never under a value that is still needed."""

from __future__ import annotations

import torch

from wholestep.graph.training_graph import Output, OutputKind
from wholestep.lower import lower_interpret
from wholestep.lower.in_place import write_state_in_place

aten = torch.ops.aten
UPDATE, AUX = OutputKind.UPDATE, OutputKind.AUX


def targets(imperative):
    return [node.target for node in imperative.graph.nodes if node.op == "call_function"]


def run_both(step):
    """(outputs, inputs afterwards) of the lowered graph, checked against the functional one."""
    expected, after = step.reference()
    inputs = step.fresh()
    got = lower_interpret(step.graph)(inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(inputs, after, rtol=0, atol=0)
    return got, inputs


def test_optimizer_becomes_its_twin_without_copies(traced):
    imperative = write_state_in_place(traced("mlp").graph)
    assert imperative.num_in_place == 1
    assert imperative.num_copies == imperative.num_snapshots == 0
    names = [getattr(target, "__name__", "") for target in targets(imperative)]
    assert "sgd_" in names
    assert aten.copy_.default not in targets(imperative)


def test_a_late_reader_of_the_old_parameter_forbids_the_twin(traced):
    step = traced("mlp")
    module = step.graph.module
    weight, output = step.graph.placeholders[0], step.graph.output_node
    with module.graph.inserting_before(output):
        late = module.graph.call_function(aten.sum.default, (weight,))
    output.args = ((*output.args[0], late),)
    module.recompile()
    step.graph.outputs += (Output(AUX, "late"),)
    imperative = write_state_in_place(step.graph)
    assert imperative.num_in_place == 0
    assert imperative.num_copies == 8
    got, _ = run_both(step)
    torch.testing.assert_close(got[-1], step.tensors[0].sum())


def test_result_of_an_update_that_is_read_again_comes_from_the_state(traced):
    """Master weights: the new value is cast, returned and kept, while the update stays in place."""
    step = traced("mlp")
    module, output = step.graph.module, step.graph.output_node
    new = step.graph.output_values[1]
    with module.graph.inserting_before(output):
        half = module.graph.call_function(aten._to_copy.default, (new,), {"dtype": torch.float16})
    output.args = ((*output.args[0], half, new),)
    module.recompile()
    step.graph.outputs += (Output(AUX, "half"), Output(AUX, "new"))
    assert write_state_in_place(step.graph).num_in_place == 1
    got, inputs = run_both(step)
    assert torch.equal(got[-1], inputs[0])
    assert got[-1].data_ptr() != inputs[0].data_ptr()


def test_swapped_and_rotated_buffers(functional_trace):
    swap = functional_trace(
        lambda a, b: (b, a), [torch.ones(3), torch.zeros(3)], [Output(UPDATE, "a", 0), Output(UPDATE, "b", 1)]
    )
    run_both(swap)
    rotate = functional_trace(
        lambda a, b, c: (b.flip(0), c.t(), a[:]),
        [torch.randn(3, 3) for _ in range(3)],
        [Output(UPDATE, name, i) for i, name in enumerate("abc")],
    )
    run_both(rotate)


def test_a_view_of_its_own_old_value(functional_trace):
    step = functional_trace(lambda a: (a.t(),), [torch.randn(3, 3)], [Output(UPDATE, "a", 0)])
    run_both(step)


def test_an_unchanged_input_is_not_written(functional_trace):
    step = functional_trace(lambda a: (a, a.sum()), [torch.randn(3)], [Output(UPDATE, "a", 0), Output(AUX, "s")])
    assert write_state_in_place(step.graph).num_copies == 0
    run_both(step)


def test_returned_state_is_a_snapshot_of_the_old_value(functional_trace):
    step = functional_trace(
        lambda a: (a, a.view(-1), a + 1),
        [torch.randn(2, 3)],
        [Output(AUX, "x"), Output(AUX, "v"), Output(UPDATE, "a", 0)],
    )
    got, inputs = run_both(step)
    kept = got[0].clone()
    inputs[0].zero_()
    assert torch.equal(got[0], kept)


def test_the_copy_waits_for_the_last_reader_of_a_view(functional_trace):
    def body(a):
        flipped = a.t()
        new = a * 2
        return new, (flipped @ new).sum()

    step = functional_trace(body, [torch.randn(3, 3)], [Output(UPDATE, "a", 0), Output(AUX, "s")])
    order = targets(write_state_in_place(step.graph))
    assert order.index(aten.copy_.default) > order.index(aten.mm.default)
    run_both(step)


def test_accumulated_gradients_are_copied_early(functional_trace):
    """Each accumulated gradient is written as soon as it exists, so that no second copy of all of them lives."""
    step = functional_trace(
        lambda a, b, x: (a + x, b + x * 2, (x * x).sum()),
        [torch.randn(4) for _ in range(3)],
        [Output(UPDATE, "a", 0), Output(UPDATE, "b", 1), Output(AUX, "s")],
    )
    order = targets(write_state_in_place(step.graph))
    assert order.index(aten.copy_.default) < order.index(aten.sum.default)
    run_both(step)


def test_a_chunk_of_old_state_is_kept_although_its_operator_hides_that_it_is_a_view(functional_trace):
    """unsafe_split shares memory without its schema saying so: the returned half must be the value before the write."""
    step = functional_trace(
        lambda a: (aten.unsafe_split.Tensor(a, 2)[0], a + 1),
        [torch.randn(4)],
        [Output(AUX, "half"), Output(UPDATE, "a", 0)],
    )
    run_both(step)
