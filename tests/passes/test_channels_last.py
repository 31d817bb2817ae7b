"""Convolutions on channels-last memory: the strides that are announced are those at run time, and training is the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fuzz.check import assert_right
from tests.fuzz.program import Case
from tests.passes.small_graphs import operators, traced
from tests.passes.test_recompute import everything
from tests.runtime.twins import Side, Twins, eager_update, interpreted
from torch import fx, nn

import wholestep
import wholestep.passes.channels_last as rules
from wholestep.capture.dry import dry_capture
from wholestep.cost.devices import find_device
from wholestep.errors import BadOption
from wholestep.graph.check import check
from wholestep.graph.copies import copy_graph
from wholestep.graph.liveness import peak_bytes
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import OutputKind, Target, TrainingGraph, tensors_in
from wholestep.lower import lower_inductor, lower_interpret
from wholestep.lower.statements import statement_of
from wholestep.passes.channels_last import channels_last
from wholestep.passes.fold_casts import fold_casts
from wholestep.passes.fold_views import fold_views
from wholestep.passes.lean_gradients import lean_gradients
from wholestep.passes.pipeline import Pipeline, default_passes, default_pipeline
from wholestep.passes.share_equal import share_equal
from wholestep.plan.memory import MemoryPlanner
from wholestep.plan.peak import timeline
from wholestep.plan.problem import make_problem
from wholestep.plan.seconds import Clock

aten = torch.ops.aten
FORMAT = torch.channels_last
FORCED = functools.partial(channels_last, force=True)
CLASSES = 4


def forced() -> Pipeline:
    """The default passes, with this one for every convolution on every device."""
    return default_passes().replaced("channels_last", FORCED)


# ---- models ----


class Residual(nn.Module):
    """A ResNet of one block: large first convolution, max pooling, a shortcut, average pooling, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.branch = nn.Sequential(
            nn.Conv2d(8, 4, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 12, 3, 1, 1, bias=False),
            nn.BatchNorm2d(12),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(self.branch(x) + self.shortcut(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Towers(nn.Module):
    """Branches that are concatenated, as in Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.towers = nn.ModuleList([nn.Conv2d(4, 3, 1), nn.Conv2d(4, 5, 3, padding=1), nn.MaxPool2d(3, 1, 1)])
        self.last = nn.Conv2d(12, CLASSES, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        return self.last(torch.cat([tower(x) for tower in self.towers], 1)).mean((2, 3))


class Hourglass(nn.Module):
    """Down, up by a transposed convolution and by interpolation, group norms, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.25))
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.smooth = nn.Conv2d(12, 6, 3, padding=1)
        self.head = nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.down(x)
        both = torch.cat([self.up(low), F.interpolate(low, scale_factor=2.0, mode="nearest")], 1)
        return self.head(F.gelu(self.smooth(both))).amax((2, 3))


class TwoScales(nn.Module):
    """A convolution that sees a single pixel, for which both layouts are the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 6, 3, 2, 1)
        self.squeeze = nn.Conv2d(6, 2, 1)
        self.excite = nn.Conv2d(2, 6, 1)
        self.head = nn.Linear(6 * 16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head((x * scale).flatten(1))


def frozen() -> nn.Module:
    """Statistics are not updated, and the first convolution is not trained."""
    model = Residual().eval()
    for parameter in model.stem.parameters():
        parameter.requires_grad_(False)
    return model


def pooled(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (2, 3, 16, 16)),
    "towers": (Towers, (2, 3, 8, 8)),
    "hourglass": (Hourglass, (2, 3, 8, 8)),
    "single pixel": (TwoScales, (2, 3, 8, 8)),
    "frozen": (frozen, (2, 3, 16, 16)),
    "odd sizes": (
        lambda: pooled(nn.Conv2d(3, 5, 3), nn.LeakyReLU(), nn.Conv2d(5, CLASSES, (2, 3), padding=1)),
        (1, 3, 7, 5),
    ),
    "normed": (
        lambda: pooled(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, CLASSES, 3)),
        (2, 3, 9, 9),
    ),
    "grouped": (
        lambda: pooled(
            nn.Conv2d(3, 6, 3), nn.Hardswish(), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, CLASSES, 1, groups=2)
        ),
        (2, 3, 7, 7),
    ),
    "one channel": (lambda: pooled(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, CLASSES, 3)), (2, 1, 7, 7)),
    "flattened": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * 9, CLASSES)),
        (2, 3, 8, 8),
    ),
    "one pixel in all": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1), nn.Flatten()),
        (3, 3, 1, 1),
    ),
}


def classify(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def side_of(name: str, optimizer: str = "sgd") -> Side:
    model = MODELS[name][0]()
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer == "sgd":
        return Side(model, torch.optim.SGD(trained, lr=0.05, momentum=0.9), classify)
    # The large eps keeps gradients that are nearly zero, of which only the rounding differs, from moving a parameter.
    return Side(model, torch.optim.AdamW(trained, lr=1e-2, eps=1e-2), classify)


def batches_of(name: str, count: int = 3, times: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(3)
    rows, *rest = MODELS[name][1]
    return [
        (
            torch.randn(rows * times, *rest, generator=source),
            torch.randint(0, CLASSES, (rows * times,), generator=source),
        )
        for _ in range(count)
    ]


def graph_of(name: str, **options: Any) -> TrainingGraph:
    torch.manual_seed(0)
    side = side_of(name)
    return interpreted(side, batches_of(name)[0], **{"passes": forced(), "check": "off", **options}).graph


def convolutions(graph: TrainingGraph) -> list[fx.Node]:
    return [
        node
        for node in graph.operations()
        if node.target in (aten.convolution.default, aten.convolution_backward.default)
    ]


def images_and_weight(node: fx.Node) -> list[fx.Node]:
    return list(node.args[: 2 if node.target is aten.convolution.default else 3])  # type: ignore[arg-type]


def layout_copies(graph: TrainingGraph) -> list[fx.Node]:
    """Clones that ask for a layout, of activations and their gradients."""
    named = set(graph.gradients.values())
    clones = [
        node for node in graph.operations() if node.target is aten.clone.default and node.kwargs.get("memory_format")
    ]
    return [node for node in clones if node.name not in named and node.args[0].op != "placeholder"]  # type: ignore[union-attr]


# ---- strides ----


def significant(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def stand_in(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.uniform_(0.1, 1.0) if value.is_floating_point() else made.zero_()


def run_comparing_strides(graph: TrainingGraph) -> int:
    """Run every node on real tensors; each result must lie in memory as its fake tensor says. The number of results."""
    values: dict[fx.Node, Any] = {node: stand_in(node.meta["val"]) for node in graph.placeholders}
    compared = 0
    for node in graph.operations():
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        values[node] = statement_of(node).function(*args, **kwargs)
        for real, fake in zip(tensors_in(values[node]), tensors_in(node.meta["val"]), strict=True):
            assert real.shape == fake.shape or not real.numel(), node
            assert significant(real) == significant(fake), f"{node}: {real.stride()}, announced {fake.stride()}"
            compared += 1
    return compared


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_convolutions_are_channels_last_as_announced_and_at_run_time(name: str, precision: str) -> None:
    graph = graph_of(name, precision=precision)
    check(graph)
    found = convolutions(graph)
    assert found
    for node in found:
        for value in images_and_weight(node):
            assert value.meta["val"].is_contiguous(memory_format=FORMAT), (node, value)
    assert run_comparing_strides(graph) > len(found)


def test_a_residual_network_copies_no_activation_but_the_images() -> None:
    graph = graph_of("residual")
    assert [node.args[0].op for node in layout_copies(graph)] == []  # type: ignore[union-attr]
    images = [n for n in graph.operations() if n.target is aten.clone.default and n.meta["val"].shape == (2, 3, 16, 16)]
    assert len(images) == 1


def test_in_bf16_the_cast_of_the_images_and_of_the_weights_writes_the_layout() -> None:
    graph = graph_of("residual", precision="bf16")
    assert not layout_copies(graph)
    for node in convolutions(graph):
        if node.target is aten.convolution.default:
            assert node.args[1].target is aten._to_copy.default  # type: ignore[union-attr]
            backward = [user for user in node.args[1].users if user is not node]  # type: ignore[union-attr]
            assert [user.target for user in backward] == [aten.convolution_backward.default], "one cast for both"
    clones = [node for node in graph.operations() if node.target is aten.clone.default]
    assert all(node.name in graph.gradients.values() for node in clones)


def test_flattened_features_are_copied_once_each_way() -> None:
    assert len(layout_copies(graph_of("flattened"))) <= 2


@pytest.mark.parametrize("name", ["residual", "hourglass"])
def test_what_the_update_reads_has_the_strides_it_was_captured_with(name: str) -> None:
    turned, plain = graph_of(name, clip_norm=1.0), graph_of(name, passes=Pipeline([]), clip_norm=1.0)
    assert OutputKind.UPDATE in {output.kind for output in turned.outputs}
    assert turned.gradients.keys() == plain.gradients.keys()
    for parameter, gradient in turned.gradients.items():
        assert significant(turned.node(gradient).meta["val"]) == significant(
            plain.node(plain.gradients[parameter]).meta["val"]
        )
    for one, other in zip(turned.output_values, plain.output_values, strict=True):
        assert significant(one.meta["val"]) == significant(other.meta["val"])


# ---- numbers ----

CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "sgd", {}) for name in MODELS if name != "hourglass"),  # its dropout draws our own numbers
    ("residual", "adamw", {}),
    ("residual", "sgd", {"clip_norm": 0.5}),
    ("towers", "adamw", {"clip_norm": 0.5}),
]


@pytest.mark.parametrize(("name", "optimizer", "options"), CASES, ids=str)
def test_three_steps_are_those_of_eager(name: str, optimizer: str, options: dict[str, Any]) -> None:
    """Other kernels sum in another order: 1e-4 is what float32 leaves of three steps."""
    twins = Twins(lambda: side_of(name, optimizer), batches_of(name)[0], passes=forced(), **options)
    for batch in batches_of(name):
        loss = twins.step(batch)
        expected, norm = eager_update(twins.theirs, batch, twins.clip_norm)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        if norm is not None:
            torch.testing.assert_close(twins.step.grad_norm, norm, rtol=1e-4, atol=1e-5)
    twins.assert_same_state(1e-4)
    assert_strides_kept(twins.ours, twins.theirs)


@pytest.mark.parametrize("name", ["residual", "hourglass"])
def test_three_steps_are_those_without_the_pass(name: str) -> None:
    turned, plain = (_trained(name, "sgd", passes) for passes in (forced(), default_passes()))
    torch.testing.assert_close(turned, plain, rtol=1e-4, atol=1e-5)


def assert_strides_kept(ours: Side, theirs: Side) -> None:
    """Parameters, buffers, gradients and optimizer state lie in memory as eager's."""
    for mine, its in zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True):
        assert mine.stride() == its.stride()
    assert ours.optimizer is not None and theirs.optimizer is not None
    for mine, its in zip(ours.trained, theirs.trained, strict=True):
        states = ours.optimizer.state[mine], theirs.optimizer.state[its]
        for key, value in states[1].items():
            if isinstance(value, torch.Tensor):
                assert states[0][key].stride() == value.stride(), key


def _trained(name: str, optimizer: str, passes: Pipeline, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    side = side_of(name, optimizer)
    batches = batches_of(name, times=options.get("accumulate", 1))
    step = interpreted(side, batches[0], passes=passes, seed=5, **options)
    losses = [step(batch).clone() for batch in batches]
    return [*losses, *(p.detach() for p in side.model.state_dict().values())]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_bf16_trains_as_without_the_pass(optimizer: str) -> None:
    """Within what bf16 rounds: 8 bits, of losses and of parameters that moved three small steps."""
    turned, plain = (_trained("residual", optimizer, p, precision="bf16") for p in (forced(), default_passes()))
    torch.testing.assert_close(turned, plain, rtol=3e-2, atol=2e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulated_gradients_are_the_same(precision: str) -> None:
    options = {"accumulate": 2, "precision": precision}
    turned, plain = (_trained("residual", "sgd", p, **options) for p in (forced(), default_passes()))
    tolerance = 1e-4 if precision == "fp32" else 3e-2
    torch.testing.assert_close(turned, plain, rtol=tolerance, atol=tolerance)


def test_gradients_that_are_handed_over_are_contiguous() -> None:
    torch.manual_seed(0)
    side = side_of("residual")
    batch = batches_of("residual")[0]
    step = wholestep.compile(side.model, classify, None, batch, passes=forced(), backend="interpret", cache=False)
    step(batch)
    for parameter in side.model.parameters():
        assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_strides_are_as_announced_and_the_first_step_is_eagers(precision: str) -> None:
    with torch.device("cuda"):
        model = pooled(
            nn.Conv2d(3, 128, 3), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(128, CLASSES, 3)
        )
        batch = torch.randn(4, 3, 32, 32), torch.randint(0, CLASSES, (4,))
    side = Side(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), classify)
    step = interpreted(side, batch, precision=precision)
    step(batch)
    assert step.graph is not None
    for node in convolutions(step.graph):
        assert all(value.meta["val"].is_contiguous(memory_format=FORMAT) for value in images_and_weight(node))
    run_comparing_strides(step.graph)


# ---- with the rest ----


def test_recomputing_all_that_may_be_is_the_same_bits() -> None:
    again_all = Pipeline([*forced(), lambda graph: forced().carry_out(graph, everything(graph))])
    kept, again = (_trained("residual", "sgd", passes) for passes in (forced(), again_all))
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_the_planner_finds_a_plan_that_holds_less() -> None:
    graph = graph_of("residual", precision="bf16")
    problem = make_problem(graph, timeline(graph), Clock(find_device("h200")))
    lean = default_passes().carry_out(copy_graph(graph), Plan(recompute=MemoryPlanner(problem).least().again))
    check(lean)
    assert peak_bytes(lean) < peak_bytes(graph)
    run_comparing_strides(lean)


@pytest.mark.slow
def test_compiled_code_computes_the_same() -> None:
    """Regions are handed channels-last values and give them; Inductor must agree with what is announced."""
    torch.manual_seed(0)
    graph = graph_of("normed")
    given = [stand_in(node.meta["val"]) for node in graph.placeholders]
    losses = []
    for lower in (lower_interpret, lower_inductor):
        inputs = [t.clone() for t in given]
        losses.append([*lower(graph)(list(inputs)), *inputs])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)


def test_folds_that_come_later_keep_the_layouts() -> None:
    """Casts and clones that write a layout are not the plain ones, whoever calls the folds again."""
    graph = graph_of("residual", precision="bf16")
    before = [node.kwargs.get("memory_format") for node in graph.operations()]
    again = Pipeline([fold_views, fold_casts, share_equal, lean_gradients]).run(graph)[0]
    assert [node.kwargs.get("memory_format") for node in again.operations()] == before
    run_comparing_strides(again)


def test_a_captured_graph_from_the_disk_is_rewritten_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    graphs = [graph_of("normed", cache=True) for _ in range(2)]
    assert operators(graphs[0]) == operators(graphs[1])
    run_comparing_strides(graphs[1])


def test_it_says_what_it_did() -> None:
    torch.manual_seed(0)
    step = interpreted(side_of("residual"), batches_of("residual")[0], passes=forced(), check="off", precision="bf16")
    assert "channels_last: 4 convolutions channels-last, 0 layout copies of activations" in step.explain()


def test_it_can_be_left_out() -> None:
    graph = graph_of("residual", passes=default_passes().without("channels_last"))
    assert not any(n.kwargs.get("memory_format") for n in graph.operations())


# ---- where it does nothing ----


def test_on_the_cpu_and_without_convolutions_the_graph_is_left_alone() -> None:
    def convolves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w).sum()

    def multiplies(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sum()

    images = traced(convolves, torch.randn(2, 128, 8, 8), torch.randn(128, 128, 3, 3))
    before = operators(images)
    assert channels_last(images) is images and operators(images) == before and not images.notes
    plain = traced(multiplies, torch.randn(3, 4), torch.randn(4, 5))
    assert channels_last(plain) is plain and FORCED(plain) is plain


def on_a_gpu(graph: TrainingGraph) -> TrainingGraph:
    """The graph as if captured there."""
    graph.target = Target("cuda")
    return graph


@pytest.mark.parametrize(("device", "used"), [("cuda", True), ("cpu", False)])
def test_a_capture_without_a_gpu_is_laid_out_as_one_there(device: str, used: bool) -> None:
    """So that `wholestep plan` sees the copies that a GPU would make."""
    model = nn.Sequential(
        *(m for _ in range(4) for m in (nn.Conv2d(128, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = dry_capture(
        model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(4, 128, 12, 12), device=device
    )
    told = default_pipeline().run_on(capture)
    assert capture.graph.target.is_gpu is used
    assert any("4 convolutions channels-last" in line for line in told) is used
    turned = [node for node in capture.graph.operations() if node.target is torch.ops.aten.convolution.default]
    assert all(node.meta["val"].is_contiguous(memory_format=torch.channels_last) is used for node in turned) and turned


WIDE, NARROW = (128, 128, 3, 3), (64, 64, 3, 3)


@pytest.mark.parametrize(
    ("weight", "groups", "dtype", "tf32", "gains"),
    [
        (WIDE, 1, torch.bfloat16, False, True),
        (WIDE, 1, torch.float16, False, True),
        (WIDE, 1, torch.float32, True, True),
        (WIDE, 1, torch.float32, False, False),
        (WIDE, 1, torch.float64, True, False),
        (NARROW, 1, torch.bfloat16, False, False),
        ((128, 1, 3, 3), 128, torch.bfloat16, False, True),
        ((128, 32, 3, 3), 4, torch.bfloat16, False, False),
    ],
    ids=str,
)
def test_it_is_tried_where_tensor_cores_gain(
    weight: tuple[int, ...], groups: int, dtype: torch.dtype, tf32: bool, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, groups=groups).sum()

    tried: list[set[str]] = []

    class Tried(rules.Relayout):
        def __init__(self, graph: TrainingGraph, names: set[str]) -> None:
            tried.append(names)
            raise rules.GivenUp("told")

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    monkeypatch.setattr(rules, "Relayout", Tried)
    images = torch.empty(2, weight[1] * groups, 8, 8, dtype=dtype)
    graph = on_a_gpu(traced(step, images, torch.empty(weight, dtype=dtype)))
    assert channels_last(graph) is graph
    assert bool(tried) is gains


def test_convolutions_over_sequences_and_volumes_are_left_alone() -> None:
    def over_sequence(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, w).sum()

    def over_volume(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv3d(x, w).sum()

    for function, sizes in ((over_sequence, (8,)), (over_volume, (8, 8, 8))):
        kernel = (3,) * len(sizes)
        graph = traced(function, torch.randn(2, 4, *sizes), torch.randn(4, 4, *kernel))
        assert FORCED(graph) is graph


def test_a_model_that_is_channels_last_already_is_left_alone() -> None:
    def convolves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w).relu().sum()

    turned = [t.to(memory_format=FORMAT) for t in (torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3))]
    graph = traced(convolves, *turned)
    assert FORCED(graph) is graph


def test_operators_that_are_not_known_read_what_they_were_captured_with() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.roll(F.conv2d(x, w), 1, 2).sum()

    inputs = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
    graph = FORCED(traced(step, *inputs))
    (roll,) = [node for node in graph.operations() if node.target is aten.roll.default]
    assert roll.args[0].meta["val"].is_contiguous()  # type: ignore[union-attr]
    torch.testing.assert_close(graph.module(*inputs)[0], step(*inputs), rtol=1e-4, atol=1e-4)
    assert graph.notes == ["1 convolutions channels-last, 2 layout copies of activations, 1 of weights and gradients"]


def test_results_keep_their_strides_also_when_they_are_transposed() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y = F.conv2d(x, w)
        return [y.sum(), y, y.transpose(2, 3)]

    inputs = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
    graph = FORCED(traced(step, *inputs))
    for ours, theirs in zip(graph.module(*inputs), step(*inputs), strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class PickedByPlace(nn.Module):
    """as_strided picks elements by where they lie in memory: it reads the layout that was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 1, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x).as_strided((2, 2), (1, 1)).sum()


def test_elements_picked_by_their_place_in_memory() -> None:
    assert_right(Case(PickedByPlace, lambda: (torch.randn(1, 2, 2, 2),), guards=False), stage="channels_last")


class Counted(nn.Module):
    """How many sizes there are is told by data: `bincount` of what was convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x)
        return (x * torch.bincount(x.detach().argmax(-1).flatten(), minlength=1)).square().mean()


def test_sizes_that_data_tells_stay_as_they_are() -> None:
    assert_right(Case(Counted, lambda: (torch.randn(1, 1, 2, 1),), guards=False), stage="channels_last")


def test_a_plan_says_where() -> None:
    """What it names is done, whether it pays or not; what it leaves as written is; `step.plan` says what became of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 2))
    batch = torch.randn(2, 3, 8, 8)

    def compiled(**layout: str) -> Any:
        made, named = copy.deepcopy(model), {"0": layout.get("first"), "2": layout.get("second")}
        plan = Plan(layout={place: said for place, said in named.items() if said})
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        return wholestep.compile(
            made, lambda m, x: m(x).square().mean(), optimizer, batch, plan=plan, backend="interpret", cache=False
        )

    plain, one, both = (
        compiled(),
        compiled(second="channels_last"),
        compiled(first="channels_last", second="channels_last"),
    )
    assert (dict(plain.plan.layout), dict(one.plan.layout)) == ({}, {"2": "channels_last"})
    assert set(both.plan.layout) == {"0", "2"}
    losses = [[float(step(batch)) for _ in range(3)] for step in (plain, one, both)]
    assert losses[0] == pytest.approx(losses[1]) and losses[0] == pytest.approx(losses[2])
    with pytest.raises(BadOption, match=r"the plan asks for a layout of '9', where nothing has one"):
        wholestep.compile(model, lambda m, x: m(x).sum(), None, batch, plan=Plan(layout={"9": "channels_last"}))
    with pytest.raises(BadOption, match="layout 'nhwc' for '0'"):
        wholestep.compile(model, lambda m, x: m(x).sum(), None, batch, plan=Plan(layout={"0": "nhwc"}))
