"""Six models through the front end's graph, in float64: loss and gradients of 2 and 4 ranks against the captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.schedule.mesh_models import RECIPES, Made, cut_model, gpt2, llama, mixtral, t5
from tests.schedule.sharding.ranks import compare
from torch import nn

from wholestep.capture.front import Front, traced
from wholestep.capture.subject import make_subject
from wholestep.errors import WholestepError
from wholestep.graph.mesh import Mesh
from wholestep.schedule.cuts import cuts_of, syncs_of
from wholestep.schedule.sharding import Localised

pytestmark = pytest.mark.filterwarnings("ignore:.*stays whole")
LOSS = Callable[[Any, Any], torch.Tensor]


def followed(sch: Any, loss: LOSS | None, batch: dict[str, torch.Tensor], ranks: int, *, tolerance: float) -> Localised:
    """The schedule's model, its loss captured, made the program of one rank and compared."""
    model, recipe = sch.model, sch.recipe
    graph, args = Front(make_subject(model, loss, None)).look(batch, lambda graph, args: (graph, args))
    for node in graph.module.graph.find_nodes(op="call_function", target=traced.mark_loss):
        node.replace_all_uses_with(node.args[0])  # it detaches
        graph.module.graph.erase_node(node)
    graph.module.recompile()
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    places = graph.module.graph.find_nodes(op="placeholder")
    names = {node: known[id(value)] for node, value in zip(places, args) if id(value) in known}
    cuts = cuts_of(recipe, sch.modules, Mesh(tp=ranks))
    syncs = syncs_of(recipe, sch.modules)
    return compare(graph.module, list(args), names, cuts, ranks, syncs=syncs, paths=graph.paths, tolerance=tolerance)


QUICK = {(llama, 4), (t5, 2), (mixtral, 2)}  # tests/schedule/test_mesh.py has others
EVERY = [
    pytest.param(make, ranks, marks=() if (make, ranks) in QUICK else pytest.mark.slow, id=f"{make.__name__}-{ranks}")
    for make in RECIPES
    for ranks in (2, 4)
]


@pytest.mark.parametrize(("make", "ranks"), EVERY)
def test_gradients_of_ranks_are_those_of_the_model(make: Callable[[], Made], ranks: int) -> None:
    model, batch, sch = cut_model(make)
    model.double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    rounded = make in (gpt2, llama, mixtral)  # their logits are float32 whatever the model is
    found = followed(sch, None, batch, ranks, tolerance=1e-6 if rounded else 1e-10)
    assert not any(one.name in ("all_gather", "reduce_scatter") for one in found.collectives)
    kept = {name.rpartition(".")[0].rpartition(".")[2] for name in found.whole}
    assert kept == ({"k_proj", "v_proj"} if make in (llama, mixtral) and ranks == 4 else set())


def test_three_in_one_are_found() -> None:
    _, batch, sch = cut_model(gpt2)
    found = followed(sch, None, batch, 2, tolerance=1e-4)
    assert {(cut.sizes, cut.times) for name, cut in found.cuts.items() if "c_attn" in name} == {((32,), 3)}
    by_module = {(one.module, one.name) for one in found.collectives}
    assert {("transformer.h.0.attn.c_attn", "enter"), ("transformer.h.1.mlp.c_proj", "all_reduce")} <= by_module
    assert sum(one.name == "all_reduce" for one in found.collectives) == 5 + 3  # embedding, two layers; the loss's own


# ---- sync lines ----


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Mlp(), Mlp())
        self.head = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).sort(-1).values.pow(3).mean()


def made() -> tuple[dict[str, torch.Tensor], Any]:
    import wholestep

    torch.manual_seed(0)
    sch = wholestep.schedule(Net().double())
    sch["layers.*.up"].shard("weight", 0)
    sch["layers.*.down"].shard("weight", 1)
    return {"x": torch.randn(4, 6, 8, dtype=torch.float64)}, sch


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_output_is_gathered_where_a_line_says_so(ranks: int) -> None:
    batch, sch = made()
    sch["head"].shard("weight", 0)
    with pytest.raises(WholestepError, match=r"sort along it.*head.weight is cut.*test_models.py.*all_gather"):
        followed(sch, loss, batch, ranks, tolerance=1e-10)
    sch["head"].sync("all_gather", axis=-1)
    found = followed(sch, loss, batch, ranks, tolerance=1e-10)
    assert [(one.module, one.name) for one in found.collectives][-1] == ("head", "all_gather")


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_can_be_cut_between_layers(ranks: int) -> None:
    """Sums are scattered over rows, norms work on rows, and rows are gathered before the next product."""
    batch, sch = made()
    sch["layers.*.down"].sync("reduce_scatter", axis=0)
    sch["layers.1.norm"].sync("all_gather", axis=0)
    found = followed(sch, loss, batch, ranks, tolerance=1e-10)
    names = [one.name for one in found.collectives]
    assert names.count("reduce_scatter") == 2 and names.count("all_gather") == 1
    sch["layers.0.norm"].sync("all_gather", axis=0)
    with pytest.raises(WholestepError, match=r"line 5 of the schedule .*all_gather.*where a value is whole"):
        followed(sch, loss, batch, ranks, tolerance=1e-10)


def test_an_input_is_scattered_where_a_line_says_so() -> None:
    batch, sch = made()
    sch["head"].sync("scatter", when="forward_input", axis=1)
    found = followed(sch, loss, batch, 2, tolerance=1e-10)
    assert ("head", "own_part") in {(one.module, one.name) for one in found.collectives}


def test_what_is_exchanged_can_be_printed() -> None:
    batch, sch = made()
    sch.example = (batch["x"].float(),)
    sch.model.float()
    lines = str(sch.exchanges(Mesh(tp=2))).splitlines()
    assert lines[:2] == [
        "layers.0.up: enter of 768 bytes, read by cut values",
        "layers.0.up: own_part of 64 bytes, meets a cut value",
    ]
    assert "layers.1.down: all_reduce of 768 bytes, ranks have parts of the sum" in lines
    assert "enter" not in str(sch.forward().module.graph)


def test_a_sum_that_does_not_follow_is_an_error() -> None:
    batch, sch = made()
    sch["layers.*.down"].sync("all_reduce")
    sch["layers.*.up"].sync("all_reduce", when="backward")
    followed(sch, loss, batch, 2, tolerance=1e-10)
    sch["head"].sync("all_reduce")
    with pytest.raises(WholestepError, match=r"line 5 of the schedule \(sync head.*follows no exchange there"):
        followed(sch, loss, batch, 2, tolerance=1e-10)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (lambda sch: sch["head"].shard("weight", 0, blocks=5), "blocks=5"),
        (lambda sch: sch["head"].shard("weight", 0, blocks=[4, 4]), "sum is 12"),
        (lambda sch: sch["head"].shard("weight", 0, parts=8), "4 ranks would do|6 ranks would do"),
        (lambda sch: sch["head"].shard("weight", 0, parts=4, blocks=2), "3 ranks would do"),
        (lambda sch: sch["head"].sync("all_gather"), "without a dimension"),
        (lambda sch: sch["head"].sync("scatter", when="backward", axis=0), "backward pass"),
    ],
)
def test_a_line_that_makes_no_sense_is_one_clear_error(line: Callable[[Any], Any], words: str) -> None:
    _, sch = made()
    with pytest.raises(WholestepError, match=words):
        line(sch)
