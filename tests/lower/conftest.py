"""Small training graphs for the lowering tests, traced here so that these tests do not depend on capture."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph


@torch.library.custom_op("lowertest::sgd", mutates_args=())
def sgd(
    params: list[torch.Tensor], grads: list[torch.Tensor], moments: list[torch.Tensor], lr: torch.Tensor
) -> list[torch.Tensor]:
    """A momentum update in the shape of the package's update operators: new params, then new moments."""
    new_moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
    return [p - lr * m for p, m in zip(params, new_moments, strict=True)] + new_moments


@sgd.register_fake
def _(
    params: list[torch.Tensor], grads: list[torch.Tensor], moments: list[torch.Tensor], lr: torch.Tensor
) -> list[torch.Tensor]:
    return [torch.empty_like(t) for t in [*params, *moments]]


def sgd_(params: list[torch.Tensor], grads: list[torch.Tensor], moments: list[torch.Tensor], lr: torch.Tensor) -> None:
    for p, g, m in zip(params, grads, moments, strict=True):
        m.mul_(0.9).add_(g)
        p.sub_(lr * m)


SGD = torch.ops.lowertest.sgd.default


@dataclasses.dataclass
class Traced:
    """A training graph with tensors to run it on."""

    graph: TrainingGraph
    tensors: list[torch.Tensor]

    def fresh(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.tensors]

    def reference(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Outputs that are no updates, and the inputs after the step, by plain functional interpretation."""
        inputs = self.fresh()
        with torch.no_grad():
            values = fx.Interpreter(self.graph.module).run(*inputs)
        after = list(inputs)
        for value, entry in zip(values, self.graph.outputs, strict=True):
            if entry.kind is OutputKind.UPDATE:
                after[entry.target] = value.clone()
        return [v for v, e in zip(values, self.graph.outputs, strict=True) if e.kind is not OutputKind.UPDATE], after


@contextlib.contextmanager
def _module_paths(model: nn.Module) -> Iterator[None]:
    """While tracing, every forward node learns the path of its module."""
    stack: list[Any] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(fx_traceback.annotate({"module": name}))
            stack[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        stack.pop().__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave))
    yield
    for handle in handles:
        handle.remove()


def trace_functional(step: Callable[..., Any], tensors: list[torch.Tensor]) -> fx.GraphModule:
    """`step` over fakes, traced with autograd inside, then functionalized."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
    with mode, tracing(TracingContext(mode)), enable_python_dispatcher(), fx_traceback.preserve_node_meta():
        with torch.autograd.set_multithreading_enabled(False):
            first = make_fx(step)(*fakes)
        _name_backward_modules(first)
        first.graph.eliminate_dead_code()
        with torch.no_grad():
            run = lambda *args: fx.Interpreter(first).run(*args)  # noqa: E731
            second = make_fx(torch.func.functionalize(run, remove="mutations"))(*fakes)
    for node in list(second.graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            second.graph.erase_node(node)
    second.graph.eliminate_dead_code()
    second.recompile()
    return second


def _name_backward_modules(module: fx.GraphModule) -> None:
    forward: dict[int, str] = {}
    for node in module.graph.nodes:
        custom = node.meta.get("custom") or {}
        if custom.get("phase") == "forward" and "module" in custom and "seq_nr" in node.meta:
            forward.setdefault(node.meta["seq_nr"], custom["module"])
    for node in module.graph.nodes:
        custom = node.meta.get("custom") or {}
        if custom.get("phase") == "backward" and node.meta.get("seq_nr") in forward:
            node.meta["custom"] = {**custom, "module": forward[node.meta["seq_nr"]]}


def trace_training(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor], batch: dict[str, torch.Tensor], update: str = "sgd"
) -> Traced:
    """The whole step of a model; `update` is `sgd` (the operator above) or `adamw` (`ws::adamw` with clipping)."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    slots = ("momentum",) if update == "sgd" else ("exp_avg", "exp_avg_sq")
    hyper = (
        torch.tensor(0.1) if update == "sgd" else torch.tensor([1.0, 1e-3, 0.9, 0.999, 1e-8, 0.01], dtype=torch.float64)
    )
    state = {f"{name}/{slot}": torch.zeros_like(p) for slot in slots for name, p in params.items()}
    groups = [(Role.PARAMETER, params), (Role.BUFFER, buffers), (Role.STATE, state)]
    groups += [(Role.HYPER, {"group0": hyper}), (Role.BATCH, batch)]
    inputs = tuple(Input(role, name) for role, group in groups for name in group)
    tensors = [tensor for _, group in groups for tensor in group.values()]
    index = {(entry.role, entry.name): i for i, entry in enumerate(inputs)}
    outputs = [Output(OutputKind.LOSS, "loss")]

    def step(*flat: torch.Tensor) -> list[torch.Tensor]:
        get = lambda role, names: {name: flat[index[role, name]] for name in names}  # noqa: E731
        leaves = {name: p.detach().requires_grad_() for name, p in get(Role.PARAMETER, params).items()}
        live = {name: b.clone() for name, b in get(Role.BUFFER, buffers).items()}
        with fx_traceback.annotate({"phase": "forward"}), _module_paths(model):
            loss = _call_with(model, {**leaves, **live}, lambda: loss_fn(model, get(Role.BATCH, batch)))
        setup_stacktrace_preservation_hooks([loss.grad_fn])
        with fx_traceback.annotate({"phase": "backward"}):
            grads = torch.autograd.grad(loss, list(leaves.values()))
        with torch.no_grad(), fx_traceback.annotate({"phase": "update"}):
            old = list(get(Role.PARAMETER, params).values())
            moments = [list(get(Role.STATE, [f"{n}/{slot}" for n in params]).values()) for slot in slots]
            if update == "sgd":
                new = SGD(old, list(grads), *moments, flat[index[Role.HYPER, "group0"]])
            else:
                import wholestep.ops  # noqa: F401

                _, scale = torch.ops.ws.clip(list(grads), torch.ones(()))
                new = torch.ops.ws.adamw(
                    old,
                    list(grads),
                    *moments,
                    [],
                    flat[index[Role.HYPER, "group0"]],
                    scale,
                    False,
                    False,
                    True,
                    "foreach",
                )
        return [loss.detach(), *new, *live.values()]

    module = trace_functional(step, tensors)
    names = (
        [(Role.PARAMETER, n) for n in params] + [(Role.STATE, n) for n in state] + [(Role.BUFFER, n) for n in buffers]
    )
    outputs += [Output(OutputKind.UPDATE, name, index[role, name]) for role, name in names]
    return Traced(TrainingGraph(module, inputs, tuple(outputs)), tensors)


def _call_with(model: nn.Module, tensors: dict[str, torch.Tensor], call: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.nn.utils.stateless._reparametrize_module(model, tensors, tie_weights=True):
        return call()


class Block(nn.Module):
    """A transformer-like layer without randomness."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        return x + self.mlp(x)


class Stack(nn.Module):
    """GPT-like: embedding, equal layers, tied head."""

    def __init__(self, layers: int, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed.weight.t()


class ConvNet(nn.Module):
    """Convolutions with batch norm: buffers that the step updates."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv2(torch.relu(self.bn(self.conv(x)))).mean((2, 3)))


def build(kind: str, update: str = "sgd") -> Traced:
    torch.manual_seed(0)
    name, _, layers = kind.partition("-")
    if name == "mlp":
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        batch = {"x": torch.randn(5, 6), "y": torch.randint(0, 4, (5,))}
        return trace_training(model, lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"]), batch, update)
    if name == "conv":
        batch = {"x": torch.randn(4, 3, 6, 6), "y": torch.randint(0, 10, (4,))}
        return trace_training(ConvNet(), lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"]), batch, update)
    if name == "stack":
        ids = torch.randint(0, 32, (2, 6))
        loss = lambda m, b: nn.functional.cross_entropy(m(b["ids"]).flatten(0, 1), b["ids"].flatten())  # noqa: E731
        return trace_training(Stack(int(layers)), loss, {"ids": ids}, update)
    if name == "gpt2":
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            vocab_size=64,
            n_embd=16,
            n_layer=int(layers),
            n_head=2,
            n_positions=16,
            use_cache=False,
            attn_implementation="eager",
        )
        model = transformers.GPT2LMHeadModel(config).train()
        ids = torch.randint(0, 64, (2, 8))
        return trace_training(model, lambda m, b: m(input_ids=b["ids"], labels=b["ids"]).loss, {"ids": ids}, update)
    raise KeyError(kind)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Traced]:
    """`traced("mlp")`: a small training graph; its update operator has an in-place twin."""
    from wholestep.lower import in_place

    real = in_place.in_place_twins
    monkeypatch.setattr(in_place, "in_place_twins", lambda: {**real(), SGD: sgd_})
    return build


@pytest.fixture
def functional_trace() -> Callable[..., Traced]:
    """`functional_trace(step, tensors, outputs)`: a training graph out of any function of tensors."""

    def make(step: Callable[..., Any], tensors: list[torch.Tensor], outputs: list[Output]) -> Traced:
        inputs = tuple(Input(Role.BUFFER, f"b{i}") for i in range(len(tensors)))
        return Traced(TrainingGraph(trace_functional(step, tensors), inputs, tuple(outputs)), tensors)

    return make


@pytest.fixture
def symbolic_graph() -> TrainingGraph:
    """A graph over x of shape (B, 3, 6) with B unknown, and w of shape (6, 6)."""
    from wholestep import compat

    mode = compat.new_fake_mode()
    batch = compat.new_symbol(mode, "B", 5)
    with mode:
        fakes = [torch.empty(batch, 3, 6), torch.empty(6, 6)]

    def body(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        rows = torch.softmax(x.reshape(-1, 6) @ w, -1)
        return (rows.reshape(x.shape).sum((0, 1)) / x.shape[0],)

    module = compat.trace(body, fakes, mode=mode, functional=True)
    inputs = (Input(Role.BATCH, "x"), Input(Role.PARAMETER, "w"))
    return TrainingGraph(module, inputs, (Output(OutputKind.AUX, "rows"),))
