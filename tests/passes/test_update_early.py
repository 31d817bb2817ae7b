"""Updates stand behind the backward of their layer where that is exact; the numbers are torch's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.passes.stacks import Stack, early, id_batches, next_token, side_of, updates
from tests.runtime.twins import Side, Twins, interpreted
from torch import nn

import wholestep
from wholestep.errors import BadOption
from wholestep.graph.liveness import peak_bytes
from wholestep.graph.training_graph import Role, TrainingGraph, module_of
from wholestep.lower.in_place import write_state_in_place
from wholestep.lower.regions import Region, split_regions
from wholestep.passes.pipeline import Pipeline, name_of
from wholestep.passes.update_early import update_early
from wholestep.profile.memory.profile import memory_profile

LAYERS = 4


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd with momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "sgd, dampened": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.3, foreach=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "adam, amsgrad, two groups": lambda m: torch.optim.Adam(two_groups(m), lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adamw, fused, two groups": lambda m: torch.optim.AdamW(two_groups(m), lr=1e-2, fused=True),
    "adamw, maximize, foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, maximize=True, foreach=True),
}


def updated_names(graph: TrainingGraph) -> list[list[str]]:
    """The parameters of each update node, in the order of the nodes."""
    names = {node: entry.name for node, entry in zip(graph.placeholders, graph.inputs, strict=True)}
    return [[names[p] for p in node.args[0]] for node in updates(graph)]


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, False) for name in OPTIMIZERS), ("sgd with momentum", True), ("adamw", True)]
)
def test_five_steps_are_torchs(name: str, tied: bool) -> None:
    batches = id_batches()
    twins = Twins(side_of(OPTIMIZERS[name], tied=tied, layers=2), batches[0], passes=early(), check="off")
    assert len(updates(twins.step.graph)) > 2
    assert twins.step.regions["in_place_updates"] == len(updates(twins.step.graph)), "no update may need copies"
    twins.train(batches)


def test_each_layer_is_updated_behind_its_backward() -> None:
    """Before: one node. After: head, block 3, ..., block 0, and the embedding where the one node was."""
    step = interpreted(side_of(OPTIMIZERS["adamw"])(), id_batches()[0], passes=early())
    groups = updated_names(step.graph)
    heads = [sorted({name.rsplit(".", 2)[0] if "blocks" in name else name for name in group}) for group in groups]
    assert heads[0] == ["head.weight"] and heads[-1] == ["embedding.weight"]
    layers = [f"blocks.{i}" for i in reversed(range(LAYERS))]
    assert [{".".join(n.split(".")[:2]) for n in group} for group in groups[1:-1]] == [{layer} for layer in layers]
    for node, layer in zip(updates(step.graph)[1:-1], layers, strict=True):
        behind = node.next
        while behind.target.__name__ == "getitem":
            behind = behind.next
        assert not (module_of(behind) or "").startswith(layer), "the update stands inside the layer"


def test_a_tied_parameter_is_updated_last() -> None:
    step = interpreted(side_of(OPTIMIZERS["adamw"], tied=True)(), id_batches()[0], passes=early())
    groups = updated_names(step.graph)
    assert "embedding.weight" in groups[-1] and not any("embedding.weight" in group for group in groups[:-1])


def test_a_scheduler_moves_all_parts() -> None:
    def make() -> Side:
        side = side_of(OPTIMIZERS["adam, amsgrad, two groups"])()
        side.extra = torch.optim.lr_scheduler.OneCycleLR(side.optimizer, max_lr=0.05, total_steps=8)
        return side

    batches = id_batches()
    Twins(make, batches[0], passes=early()).train(batches, after=lambda side: side.extra.step())


def test_frozen_and_unused_parameters() -> None:
    def make() -> Side:
        model = Stack()
        model.blocks[1].up.weight.requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), next_token)

    batches = id_batches()
    twins = Twins(make, batches[0], passes=early())
    names = [name for group in updated_names(twins.step.graph) for name in group]
    assert len(updates(twins.step.graph)) > 3 and not any(name.startswith(("unused", "blocks.2")) for name in names)
    twins.train(batches)


def test_an_old_value_that_is_read_later_delays_its_update() -> None:
    """Block 3 is read by a penalty whose gradient comes last of all, through block 0."""

    class Penalised(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids) * self.blocks[3].down.bias
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def make() -> Side:
        model = Penalised()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), next_token)

    batches = id_batches()
    twins = Twins(make, batches[0], passes=early())
    groups = updated_names(twins.step.graph)
    place = {name: number for number, group in enumerate(groups) for name in group}
    assert place["blocks.3.down.weight"] == 1 and place["blocks.3.down.bias"] >= place["blocks.0.norm.weight"]
    assert twins.step.regions["in_place_updates"] == len(groups)
    twins.train(batches)


def test_a_returned_parameter_is_live_and_a_copy_of_it_from_before_the_update() -> None:
    def with_weight(model: Any, ids: torch.Tensor) -> Any:
        weight = model.blocks[2].up.weight
        return next_token(model, ids), {"live": weight, "copy": weight.detach().clone()}

    def make() -> Side:
        model = Stack()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.5), with_weight)

    batches = id_batches()
    twins = Twins(make, batches[0], passes=early())
    before = twins.ours.model.blocks[2].up.weight.detach().clone()
    _, aux = twins.step(batches[0])
    assert torch.equal(aux["copy"], before)
    assert torch.equal(aux["live"], twins.ours.model.blocks[2].up.weight) and not torch.equal(aux["live"], before)


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.1}, {"nonfinite": "skip"}, {"clip_norm": 0.1, "nonfinite": "skip"}]
)
def test_what_needs_all_gradients_is_not_split(options: dict[str, Any]) -> None:
    batches = id_batches()
    twins = Twins(side_of(OPTIMIZERS["adamw"]), batches[0], passes=early(), **options)
    assert len(updates(twins.step.graph)) == 1
    assert any("update_early: all gradients live until the update" in note for note in twins.step.notes)
    twins.train(batches)


def test_small_updates_are_merged() -> None:
    step = interpreted(side_of(OPTIMIZERS["adamw"])(), id_batches()[0], passes=Pipeline([]))
    names = [node.name for node in step.graph.graph.nodes]
    assert [node.name for node in update_early(step.graph).graph.nodes] == names, "8 MiB are more than there is"
    layer = sum(p.numel() * 4 for p in Stack().blocks[0].parameters())
    update_early(step.graph, min_bytes=layer + 1)
    groups = updated_names(step.graph)
    assert len(groups) == 3 and not step.graph.notes
    assert {name.split(".")[1] for name in groups[0] if "blocks" in name} == {"3"}
    assert {name.split(".")[1] for name in groups[1]} == {"2", "1"}


def test_no_optimizer_no_change() -> None:
    model = Stack()
    step = interpreted(Side(model, None, next_token), id_batches()[0], passes=Pipeline([]))
    names = [node.name for node in step.graph.graph.nodes]
    assert [node.name for node in update_early(step.graph, min_bytes=0).graph.nodes] == names


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_stay_equal_regions(precision: str) -> None:
    def regions(passes: Pipeline) -> list[str]:
        side = side_of(OPTIMIZERS["adamw"])()
        step = interpreted(side, id_batches()[0], passes=passes, precision=precision)
        pieces = split_regions(write_state_in_place(step.graph))
        return [piece.signature for piece in pieces if isinstance(piece, Region)]

    assert regions(early()) == regions(Pipeline([]))


def step_peak(passes: Pipeline, **options: Any) -> tuple[int, int]:
    """(modelled, measured) bytes; narrow batches, so that gradients weigh more than activations."""
    side = side_of(OPTIMIZERS["sgd"], width=64)()
    batch = id_batches(rows=2)[0]
    step = interpreted(side, batch, passes=passes, check="off", **options)
    profile = memory_profile(step, model=side.model, optimizer=side.optimizer, batch=batch)
    return peak_bytes(step.graph), profile.step_peak_bytes


@pytest.mark.slow
def test_the_peak_falls() -> None:
    late, soon = step_peak(Pipeline([])), step_peak(early())
    layer = 4 * sum(p.numel() for p in Stack(width=64).blocks[0].parameters())
    assert late[0] - soon[0] >= 2 * layer, "two of four layers' gradients at the least"
    assert late[1] - soon[1] >= 2 * layer


# ---- accumulation ----


def weighted(model: Any, ids: torch.Tensor) -> Any:
    return next_token(model, ids), {"weight": torch.tensor(float(ids.numel()))}


@pytest.mark.slow
def test_accumulation_stands_behind_its_gradient_and_the_peak_falls() -> None:
    late, soon = step_peak(Pipeline([]), accumulate=2), step_peak(early(), accumulate=2)
    layer = 4 * sum(p.numel() for p in Stack(width=64).blocks[0].parameters())
    assert late[0] - soon[0] >= 2 * layer and late[1] - soon[1] >= 2 * layer


@pytest.mark.parametrize("loss_fn", [next_token, weighted])
def test_accumulated_steps_are_the_same_bits(loss_fn: Any) -> None:
    results = []
    for passes in (Pipeline([]), early()):
        torch.manual_seed(0)
        model = Stack(tied=True)
        side = Side(model, OPTIMIZERS["adam, amsgrad, two groups"](model), loss_fn)
        batches = id_batches(rows=4)
        step = interpreted(side, batches[0], passes=passes, accumulate=2)
        for batch in batches:
            step(batch)
        results.append([*model.state_dict().values()])
        assert step.update_graph is not None
        adds = [n for n in step.graph.operations() if n.all_input_nodes and is_accumulation(step.graph, n)]
        assert len(adds) == len(step.graph.gradients) + (loss_fn is weighted)
        if passes.passes:
            assert (len(updates(step.update_graph)) > 2) == (loss_fn is weighted)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def is_accumulation(graph: TrainingGraph, node: Any) -> bool:
    roles = {p: entry.role for p, entry in zip(graph.placeholders, graph.inputs, strict=True)}
    return any(roles.get(entry) is Role.GRADIENT for entry in node.all_input_nodes)


# ---- the option ----


def test_the_option_leaves_the_pass_out_or_asks_for_it() -> None:
    model, batch = Stack(), id_batches()[0]
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"backend": "interpret", "cache": False, "passes": early()}
    off = wholestep.compile(model, next_token, optimizer, batch, early_update=False, **options)
    assert len(updates(off.graph)) == 1
    for wish in (None, True):
        on = wholestep.compile(model, next_token, optimizer, batch, early_update=wish, **options)
        assert len(updates(on.graph)) > LAYERS
    with pytest.raises(BadOption, match=r"early_update=True with clip_norm=1.0.*leave early_update out"):
        wholestep.compile(model, next_token, optimizer, batch, early_update=True, clip_norm=1.0)
    with pytest.raises(BadOption, match="early_update=True with nonfinite='skip'"):
        wholestep.compile(model, next_token, optimizer, batch, early_update=True, nonfinite="skip")
    assert [name_of(one) for one in early()] == ["update_early"]


# ---- on the device ----


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["interpret", "inductor"])
def test_the_same_bits_on_a_gpu(backend: str) -> None:
    results = []
    for passes in (Pipeline([]), early()):
        torch.manual_seed(0)
        model = Stack(width=64).cuda()
        optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
        batches = [batch.cuda() for batch in id_batches(8)]
        step = wholestep.compile(model, next_token, optimizer, batches[0], passes=passes, backend=backend, cache=False)
        losses = [float(step(batch)) for batch in batches]
        results.append([torch.tensor(losses), *(t.cpu() for t in model.state_dict().values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_clipping_by_layer_is_its_own_training() -> None:
    """Each layer's gradients by their own norm: torch's clip_grad_norm_ on the parameters of every update node."""
    batches = id_batches(4)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Stack())
    ours, theirs = models
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    step = wholestep.compile(
        ours,
        next_token,
        optimizers[0],
        batches[0],
        clip_norm=0.05,
        clip_scope="layer",
        backend="interpret",
        cache=False,
    )
    parts = updated_names(step.graph)
    assert len(parts) > LAYERS
    named = dict(theirs.named_parameters())
    for batch in batches:
        optimizers[1].zero_grad()
        next_token(theirs, batch).backward()
        norms = [torch.nn.utils.clip_grad_norm_([named[name] for name in part], 0.05) for part in parts]
        optimizers[1].step()
        step(batch)
        torch.testing.assert_close(step.grad_norm, torch.stack(norms).norm())
        for name, value in ours.named_parameters():
            torch.testing.assert_close(value, named[name], rtol=1e-5, atol=1e-7)
    assert any("is not torch's clipping" in note for note in step.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_scope": "block"}, "use one of 'global', 'layer'"), ({"clip_scope": "layer"}, "no clip_norm"),
        ({"clip_scope": "layer", "clip_norm": 1.0, "nonfinite": "skip"}, "nonfinite='skip'"),
        ({"clip_scope": "layer", "clip_norm": 1.0, "accumulate": 2}, "accumulate=2"),
    ],
)  # fmt: skip
def test_what_clipping_by_layer_does_not_go_with(options: dict[str, Any], message: str) -> None:
    model = Stack()
    with pytest.raises(BadOption, match=message):
        wholestep.compile(model, next_token, torch.optim.SGD(model.parameters()), id_batches()[0], **options)
