"""Regions: equal layers have equal signatures, whatever the depth; views are made again; writes stay behind readers."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from wholestep.graph.training_graph import Output, OutputKind
from wholestep.graph.views import is_cheap_view
from wholestep.lower.in_place import write_state_in_place
from wholestep.lower.regions import Region, split_regions


def pieces_of(step, watch=()):
    return split_regions(write_state_in_place(step.graph, watch))


def regions_of(step):
    return [piece for piece in pieces_of(step) if isinstance(piece, Region)]


@pytest.mark.parametrize("family", ["stack", "gpt2"])
def test_number_of_distinct_regions_does_not_grow_with_depth(traced, family):
    shallow, deep = regions_of(traced(f"{family}-3")), regions_of(traced(f"{family}-6"))
    assert len({r.signature for r in shallow}) == len({r.signature for r in deep}) <= 6
    assert {r.signature for r in shallow} == {r.signature for r in deep}
    assert len(deep) == len(shallow) + 6
    assert sum(r.title == "layer forward" for r in deep) == 6
    assert sum(r.title == "layer backward" for r in deep) == 6


def test_a_net_without_layers_is_one_region_and_a_direct_update(traced):
    pieces = pieces_of(traced("conv"))
    assert [isinstance(piece, Region) for piece in pieces] == [True, False]
    assert pieces[0].title == "forward and backward"


def test_pieces_compute_what_the_graph_computes(traced):
    """Run region by region with plain interpretation: nothing is missing, nothing is out of order."""
    step = traced("gpt2-3")
    torch.manual_seed(3)
    expected, after = step.reference()
    imperative = write_state_in_place(step.graph)
    inputs = step.fresh()
    values = dict(zip(imperative.placeholders, inputs, strict=True))
    torch.manual_seed(3)
    with torch.no_grad():
        for piece in split_regions(imperative):
            if isinstance(piece, Region):
                results = fx.Interpreter(piece.build_module()).run(*(values[node] for node in piece.reads))
                values.update(zip(piece.defines, results, strict=True))
            else:
                args, kwargs = fx.map_arg((piece.args, piece.kwargs), values.__getitem__)
                values[piece] = piece.target(*args, **kwargs)
    torch.testing.assert_close([values[node] for node in imperative.results], expected, rtol=0, atol=0)
    torch.testing.assert_close(inputs, after, rtol=0, atol=0)


def test_views_of_parameters_do_not_cross_borders(traced):
    for region in regions_of(traced("stack-3")):
        for node in region.reads:
            assert not (is_cheap_view(node) and node.args[0].op == "placeholder")


def test_statistics_are_written_inside_the_region(traced):
    (region,) = regions_of(traced("conv"))
    assert sum(node.target is torch.ops.aten.copy_.default for node in region.body) == 3
    assert [n.target is torch.ops.aten.copy_.default for n in region.body[-3:]] == [True] * 3


def test_a_write_whose_value_is_returned_stays_outside(functional_trace):
    """Else the compiler may return the state's own memory, which the next step overwrites."""

    def body(a, x):
        new = a * 0.9 + x.exp().sin() * 0.1
        return new, new.sum(), new

    aux = [Output(OutputKind.AUX, "sum"), Output(OutputKind.AUX, "new")]
    step = functional_trace(body, [torch.randn(3), torch.randn(3)], [Output(OutputKind.UPDATE, "a", 0), *aux])
    direct = [piece.target for piece in pieces_of(step) if not isinstance(piece, Region)]
    assert direct == [torch.ops.aten.copy_.default]


@pytest.mark.parametrize("read_elsewhere", [False, True])
def test_a_write_stays_outside_where_others_read_the_old_value(functional_trace, read_elsewhere):
    """torch 2.11 compiles the write of a codebook before the look-up in it."""

    def body(table, x, places):
        found = table[places] if read_elsewhere else x
        return table * 0.9 + x.exp().sin().mean() * 0.1, (x + (found - x).tanh()).sum()

    outputs = [Output(OutputKind.UPDATE, "table", 0), Output(OutputKind.AUX, "sum")]
    step = functional_trace(body, [torch.randn(5, 3), torch.randn(4, 3), torch.tensor([0, 4, 2, 2])], outputs)
    direct = [piece.target for piece in pieces_of(step) if not isinstance(piece, Region)]
    assert direct == [torch.ops.aten.copy_.default] * read_elsewhere


def test_signature_sees_shapes_constants_and_outputs(functional_trace):
    def signature(scale, size, extra):
        def body(x):
            y = (x * scale).sin().cos()
            return (y.exp(), y) if extra else (y.exp(),)

        outputs = [Output(OutputKind.AUX, str(i)) for i in range(1 + extra)]
        (region,) = regions_of(functional_trace(body, [torch.randn(size)], outputs))
        return region.signature

    assert signature(2.0, 3, False) == signature(2.0, 3, False)
    assert (
        len({signature(2.0, 3, False), signature(3.0, 3, False), signature(2.0, 4, False), signature(2.0, 3, True)})
        == 4
    )
