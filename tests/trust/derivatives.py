"""Derivatives inside of the loss, recomputation, functional transforms, and what the loop does with modes and flags of torch."""

from __future__ import annotations

import functools
import itertools
import threading
import types
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import STEPS, Made, Net, adamw, at, cases_of, labelled, momentum, mse, pairs, sgd, train
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint

case, more = cases_of("derivatives")


@more
def trace_of_the_jacobian_by_products() -> Made:
    """Hutchinson's estimate with given probes, and a number of probes that changes."""
    held = {"probes": 1}
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    probes = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1))

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0].detach().requires_grad_(True)
        out = m(x)
        total = out.square().mean()
        for v in probes[: held["probes"]]:
            (slope,) = torch.autograd.grad(out, x, v, create_graph=True)
            total = total + (slope * v).sum(1).mean() / held["probes"]
        return total

    return train(loss, lambda i: held.update(probes=1 + i // 2), model=model)


@more
def products_forward_and_backward() -> Made:
    held = {"forward": True, "weight": 0.1}

    def loss(m: Any, b: Any) -> torch.Tensor:
        x, y = b
        if held["forward"]:
            out, slope = jvp(m, (x,), (torch.ones_like(x),))
        else:
            out, pull = vjp(m, x)
            (slope,) = pull(torch.ones_like(out))
        return F.mse_loss(out, y) + held["weight"] * slope.square().mean()

    def change(i: int) -> None:
        held["forward"] = i < 3
        held["weight"] = 0.1 * (i + 1)

    return train(loss, change)


@more
def curvature_of_a_small_function() -> Made:
    scale = {"now": 1.0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        f = lambda x: (m(x) * scale["now"]).square().sum()  # noqa: E731
        return mse(m, b) + 0.01 * hessian(f)(b[0][0]).diagonal().sum() + 0.01 * jacrev(f)(b[0][1]).abs().sum()

    return train(loss, lambda i: scale.update(now=1.0 + i))


@more
def ensemble_by_stacked_weights() -> Made:
    models = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
    weights = {"now": torch.ones(3)}

    def loss(m: Any, b: Any) -> torch.Tensor:
        stacked = {n: torch.stack([dict(x.named_parameters())[n] for x in m]) for n in ("weight", "bias")}
        out = vmap(lambda p, x: functional_call(m[0], p, (x,)), in_dims=(0, None))(stacked, b[0])
        return ((out - b[1]).square().mean((1, 2)) * weights["now"]).sum()

    return train(loss, at(3, lambda: weights.update(now=torch.tensor([1.0, 0.0, 2.0]))), model=models)


@case
def gradients_per_sample_clipped() -> Made:
    """As private training does it: gradients by sample, clipped to a norm that the loop lowers."""
    held = {"norm": 1.0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        weights = {n: p.detach() for n, p in m.named_parameters()}
        one = lambda p, x, y: F.mse_loss(functional_call(m, p, (x[None],)), y[None])  # noqa: E731
        slopes = vmap(grad(one), in_dims=(None, 0, 0))(weights, *b)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in slopes.values()]).norm(dim=0)
        factor = (held["norm"] / norms).clamp(max=1.0)
        wanted = {n: (g * factor.view(-1, *[1] * (g.dim() - 1))).mean(0) for n, g in slopes.items()}
        return sum((wanted[n] * p).sum() for n, p in m.named_parameters())

    return train(loss, lambda i: held.update(norm=1.0 / (i + 1)))


@more
def weights_perturbed_by_functional_calls() -> Made:
    held: dict[str, Any] = {"noise": 0.0, "names": ["a.weight"]}

    def loss(m: Any, b: Any) -> torch.Tensor:
        changed = {n: p + held["noise"] if n in held["names"] else p for n, p in m.named_parameters()}
        return F.mse_loss(functional_call(m, changed, (b[0],)), b[1])

    def change(i: int) -> None:
        held["noise"] = 0.05 * i
        if i == 4:
            held["names"].append("b.bias")

    return train(loss, change)


@more
def recomputed_by_both_kinds_of_checkpoint() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mode, self.scale = Net(), "plain", 1.0

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.net.a(x)) * self.scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.part(x) if self.mode == "plain" else checkpoint(self.part, x, use_reentrant=False)
            return self.net.b(hidden)

    model = Model()

    def change(i: int) -> None:
        model.mode = "again" if i >= 2 else "plain"
        model.scale = 1.0 + i

    return train(model=model, change=change)


@more
def straight_through_with_a_threshold() -> Made:
    class Binary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.limit = limit
            return (x > limit).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return g * ((x - ctx.limit).abs() < 1).to(g.dtype), None

    held = {"limit": 0.0}
    loss = lambda m, b: F.mse_loss(m.b(Binary.apply(m.a(b[0]), held["limit"])), b[1])  # noqa: E731
    return train(loss, lambda i: held.update(limit=0.05 * i))


@more
def function_that_writes_to_its_argument() -> Made:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return 2 * g

    return train(lambda m, b: F.mse_loss(m.b(Scale.apply(m.a(b[0]) + 1)), b[1]))


@more
def needs_of_gradients_asked_in_a_function() -> Made:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.T

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return g @ w if ctx.needs_input_grad[0] else None, g.T @ x if ctx.needs_input_grad[1] else None

    model = Net()
    loss = lambda m, b: F.mse_loss(Product.apply(torch.tanh(m.a(b[0])), m.b.weight), b[1])  # noqa: E731
    return train(loss, lambda i: model.b.weight.requires_grad_(i not in (2, 3)), model=model, optimizer=momentum)


@more
def part_in_inference_mode() -> Made:
    teacher, held = Net(), {"on": True}

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad() if held["on"] else torch.enable_grad():
            wanted = teacher(b[0]).detach()
        return mse(m, b) + F.mse_loss(m(b[0]), wanted)

    return train(loss, lambda i: held.update(on=i < 3))


@more
def gradients_switched_by_a_decorator() -> Made:
    class Model(Net):
        frozen = True

        @torch.no_grad()
        def quiet(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(not self.frozen):
                hidden = self.a(x)
            return self.b(torch.tanh(hidden + 0.1 * self.quiet(x)))

    model = Model()
    return train(model=model, change=lambda i: setattr(model, "frozen", i < 3), optimizer=momentum)


@more
def hook_on_an_activation_that_comes_and_goes() -> Made:
    held = {"scale": None}

    def loss(m: Any, b: Any) -> torch.Tensor:
        hidden = torch.tanh(m.a(b[0]))
        if held["scale"] is not None:
            factor = held["scale"]
            hidden.register_hook(lambda g: g * factor)
        return F.mse_loss(m.b(hidden), b[1])

    return train(loss, lambda i: held.update(scale=None if i < 2 else 0.1 * i))


@more
def parameter_hooks_that_share_a_budget() -> Made:
    """Hooks of two parameters, of which the second reads what the first has written."""
    model = Net()
    seen = {"norm": torch.zeros(())}

    def first(g: torch.Tensor) -> torch.Tensor:
        seen["norm"] = g.norm()
        return g

    model.b.weight.register_hook(first)
    model.a.weight.register_hook(lambda g: g / (1 + seen["norm"]))
    return train(model=model, state=lambda: seen["norm"].clone())


@more
def anneal_by_a_class_of_callables() -> Made:
    """Schedules composed of others, called with the step that the optimizer has made."""

    class Constant:
        def __init__(self, value: float) -> None:
            self.value = value

        def __call__(self, step: int) -> float:
            return self.value

    class Linear(Constant):
        def __call__(self, step: int) -> float:
            return self.value * (1 - step / STEPS)

    class Chain:
        def __init__(self, *parts: Any) -> None:
            self.parts = list(parts)

        def __call__(self, step: int) -> float:
            return functools.reduce(lambda a, f: a * f(step), self.parts, 1.0)

    chain, clock = Chain(Constant(2.0)), itertools.count()
    held = {"step": next(clock)}

    def change(i: int) -> None:
        held["step"] = next(clock)
        if i == 2:
            chain.parts.append(Linear(1.0))
        if i == 4:
            chain.parts[0] = Constant(0.5)

    return train(lambda m, b: mse(m, b) * chain(held["step"]), change)


@more
def flags_of_torch_switched_between_steps() -> Made:
    """Deterministic algorithms, default types and threads: what the loop sets, and puts back."""
    kept = torch.get_num_threads()

    def change(i: int) -> None:
        torch.use_deterministic_algorithms(i in (1, 2))
        torch.set_float32_matmul_precision("high" if i == 3 else "highest")
        torch.set_num_threads(1 if i == 4 else kept)
        torch.backends.cudnn.benchmark = i == 5

    def cleanup() -> None:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False
        torch.set_num_threads(kept)

    return train(change=change, cleanup=cleanup)


@more
def caches_of_dynamo_cleared_between_steps() -> Made:
    held = {"weight": 1.0}

    def change(i: int) -> None:
        held["weight"] = 1.0 if i < 3 else 0.1
        if i in (2, 4):
            torch.compiler.reset()

    return train(lambda m, b: mse(m, b) * held["weight"], change)


@more
def another_function_compiled_between_steps() -> Made:
    model = Net()
    scores: list[float] = []

    def after(i: int) -> None:
        if i in (1, 3):
            compiled = torch.compile(lambda x: model(x).square().sum(), backend="eager")
            scores.append(float(compiled(torch.ones(i + 1, 6)).detach()))

    return train(model=model, after=after, state=lambda: scores)


@more
def sizes_marked_as_dynamic() -> Made:
    batches = [(torch.randn(4 + i, 6), torch.randn(4 + i, 3)) for i in range(STEPS)]
    for x, y in batches:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
    return train(batches=batches)


@more
def warnings_filtered_by_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return mse(m, b)

    return train(loss)


@more
def lock_held_in_the_loss() -> Made:
    lock, tally = threading.Lock(), {"calls": 0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        with lock:
            tally["calls"] += 1
        return mse(m, b) * (1.0 if tally["calls"] < 4 else 0.1)

    return train(loss, state=lambda: dict(tally))


@more
def model_evaluated_and_copied_between_steps() -> Made:
    """A snapshot by `copy.deepcopy` and `torch.save` after each step must not disturb the next."""
    import copy
    import io

    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = adamw(model.parameters())
    snapshots: list[Any] = []

    def after(i: int) -> None:
        snapshots.append(copy.deepcopy(model).eval())
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
        with torch.inference_mode():
            model.eval()
            model(torch.ones(2, 6))
            model.train()

    return train(model=model, optimizer=optimizer, after=after, state=lambda: [dict(s.state_dict()) for s in snapshots])


@more
def rates_of_numpy_and_of_tensors() -> Made:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    rates: list[Any] = [0.1, np.float64(0.05), np.float32(0.2), 1, 0.01, np.float64(0.3)]

    def change(i: int) -> None:
        optimizer.param_groups[0]["lr"] = rates[i]
        optimizer.param_groups[0]["momentum"] = float(np.float32(0.5 + 0.05 * i))

    return train(model=model, optimizer=optimizer, change=change)


@more
def groups_that_hold_names_and_notes() -> Made:
    model = Net()
    groups = [{"params": [p], "name": n, "scale": 1.0} for n, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)

    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b) * optimizer.param_groups[0]["scale"]

    def change(i: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (0.5 if group["name"].endswith("bias") else 1.0) * group["scale"]
            group["scale"] = 1.0 if i < 3 else 0.1

    return train(loss, change, model=model, optimizer=optimizer)


@more
def one_parameter_in_the_optimizer_only_later() -> Made:
    """The optimizer is given the head first, and the rest when its group is extended in place."""
    model = Net()
    optimizer = sgd(model.b.parameters())
    change = at(3, lambda: optimizer.param_groups[0]["params"].extend(model.a.parameters()))
    return train(model=model, optimizer=optimizer, change=change)


@more
def loss_that_counts_by_itertools_outside() -> Made:
    clock = itertools.count(1)
    held = types.SimpleNamespace(step=0)
    loss = lambda m, b: F.cross_entropy(m(b[0]) / held.step, b[1])  # noqa: E731
    return train(loss, lambda i: setattr(held, "step", next(clock)), batches=labelled(), optimizer=adamw)


@more
def weights_stacked_before_the_step() -> Made:
    """Stacked copies are tensors of their own: they are trained instead of the modules that they came from."""
    parts = [nn.Linear(6, 3) for _ in range(2)]
    weights, _ = stack_module_state(parts)
    model = nn.ParameterDict({n.replace(".", "_"): nn.Parameter(w.detach()) for n, w in weights.items()})

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = torch.baddbmm(m["bias"][:, None], b[0].expand(2, -1, -1), m["weight"].transpose(1, 2))
        return (out - b[1]).square().mean()

    return train(loss, model=model, batches=pairs())


@more
def loss_scaled_by_a_function_that_is_given_a_number() -> Made:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * ctx.factor * 2, None

    factor = {"now": 1.0}
    return train(lambda m, b: Scaled.apply(mse(m, b), factor["now"]), lambda i: factor.update(now=1.0 + i))
