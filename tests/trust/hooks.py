"""Hooks of modules, tensors, gradients and saved values: with state, added later, removed later, for all modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, mse, sgd, train
from torch import nn
from torch.nn.modules import module as all_modules

case, more = cases_of("hooks")


# ---- forward ----


@case
def forward_hook_with_a_factor() -> Made:
    model, factor = Net(), [1.0]
    model.a.register_forward_hook(lambda module, args, out: out * factor[0])
    return train(model=model, change=at(3, factor.__setitem__, 0, 0.1))


@case
def forward_hook_collects() -> Made:
    model, seen = Net(), {}
    model.a.register_forward_hook(lambda module, args, out: seen.update(a=out.detach()))
    return train(model=model, state=lambda: dict(seen))


@more
def forward_hook_whose_activations_are_in_the_loss() -> Made:
    model, seen = Net(), []
    model.a.register_forward_hook(lambda module, args, out: seen.append(out))

    def loss(m: Any, b: Any) -> torch.Tensor:
        seen.clear()
        return mse(m, b) + 0.1 * seen[0].abs().mean() if m(b[0]) is not None else mse(m, b)

    return train(loss, model=model, state=lambda: len(seen))


@case
def forward_hook_counts() -> Made:
    class Counter:
        calls = 0

        def __call__(self, module: Any, args: Any, out: Any) -> Any:
            self.calls += 1
            return out if self.calls <= 3 else out * 0.5

    model, counter = Net(), Counter()
    model.b.register_forward_hook(counter)
    return train(model=model, state=lambda: counter.calls)


@case
def forward_pre_hook_with_a_factor() -> Made:
    model, options = Net(), {"factor": 1.0}
    model.b.register_forward_pre_hook(lambda module, args: (args[0] * options["factor"],))
    return train(model=model, change=at(3, options.update, factor=0.1))


@more
def forward_pre_hook_with_keywords() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    model, options = Model(), {"scale": 1.0}
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, {**kwargs, **options}), with_kwargs=True)
    return train(model=model, change=at(3, options.update, scale=0.1))


@case
def forward_hook_added_later() -> Made:
    model = Net()
    return train(model=model, change=at(3, model.a.register_forward_hook, lambda module, args, out: out * 0.1))


@case
def forward_hook_removed_later() -> Made:
    model = Net()
    handle = model.a.register_forward_hook(lambda module, args, out: out * 0.1)
    return train(model=model, change=at(3, handle.remove))


@more
def forward_hook_replaced_every_step() -> Made:
    model, handles = Net(), []

    def change(i: int) -> None:
        while handles:
            handles.pop().remove()
        handles.append(model.a.register_forward_hook(lambda module, args, out: out / (i + 1)))

    return train(model=model, change=change)


@more
def forward_pre_hook_added_before_others() -> Made:
    model = Net()
    model.a.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
    change = at(3, lambda: model.a.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,), prepend=True))
    return train(model=model, change=change)


@more
def forward_hook_that_removes_itself() -> Made:
    model, handles = Net(), []

    def once(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        handles.pop().remove()
        return out * 0.1

    handles.append(model.a.register_forward_hook(once))
    return train(model=model, state=lambda: len(handles))


@case
def forward_hook_inside_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        hidden: list[torch.Tensor] = []
        handle = m.a.register_forward_hook(lambda module, args, out: hidden.append(out))
        out = m(b[0])
        handle.remove()
        return F.mse_loss(out, b[1]) + 0.1 * hidden[0].square().mean()

    return train(loss)


@more
def forward_hook_that_raises() -> Made:
    model, calls = Net(), []

    def hook(module: Any, args: Any, out: torch.Tensor) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("the fourth call")

    model.a.register_forward_hook(hook)
    return train(model=model, state=lambda: len(calls), raises={3: ValueError})


@more
def forward_hook_of_a_teacher() -> Made:
    teacher, factor = Net().requires_grad_(False), [1.0]
    teacher.register_forward_hook(lambda module, args, out: out * factor[0])
    return train(lambda m, b: F.mse_loss(m(b[0]), teacher(b[0])), at(3, factor.__setitem__, 0, 0.1))


@case
def forward_hook_for_all_modules() -> Made:
    handles: list[Any] = []
    hook = lambda module, args, out: out * 0.5 if isinstance(module, nn.Linear) else None  # noqa: E731
    change = at(3, lambda: handles.append(all_modules.register_module_forward_hook(hook)))
    return train(change=change, cleanup=lambda: [handle.remove() for handle in handles])


@more
def forward_pre_hook_for_all_modules() -> Made:
    handle = all_modules.register_module_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
    return train(change=at(3, handle.remove), cleanup=handle.remove)


@more
def old_style_weight_norm() -> Made:
    model = Net()
    model.a.gain = nn.Parameter(torch.ones(16, 1))
    model.a.direction = nn.Parameter(model.a.weight.detach().clone())
    del model.a.weight
    normed = lambda m: m.direction / m.direction.norm(dim=1, keepdim=True)  # noqa: E731
    model.a.register_forward_pre_hook(lambda module, args: setattr(module, "weight", module.gain * normed(module)))
    return train(model=model)


# ---- backward ----


@more
def full_backward_hook_counts() -> Made:
    model, calls = Net(), []
    model.a.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append(len(calls)))
    return train(model=model, state=lambda: calls)


@case
def full_backward_hook_scales() -> Made:
    model, factor = Net(), [1.0]
    model.b.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * factor[0],))
    return train(model=model, change=at(3, factor.__setitem__, 0, 0.1))


@more
def full_backward_pre_hook_scales() -> Made:
    model = Net()
    model.b.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 0.5,))
    return train(model=model)


@case
def full_backward_hook_added_later() -> Made:
    model = Net()
    hook = lambda module, grad_in, grad_out: (grad_in[0] * 0.1,)  # noqa: E731
    return train(model=model, change=at(3, model.b.register_full_backward_hook, hook))


@case
def backward_hook_for_all_modules() -> Made:
    calls, handles = [], []
    register = all_modules.register_module_full_backward_hook
    change = at(3, lambda: handles.append(register(lambda module, grad_in, grad_out: calls.append(1))))
    return train(change=change, state=lambda: len(calls), cleanup=lambda: [handle.remove() for handle in handles])


# ---- tensors ----


@case
def parameter_hook_scales() -> Made:
    model, factor = Net(), [1.0]
    model.a.weight.register_hook(lambda gradient: gradient * factor[0])
    return train(model=model, change=at(3, factor.__setitem__, 0, 0.1))


@case
def parameter_hook_records_norms() -> Made:
    model, norms = Net(), []

    def record(gradient: torch.Tensor) -> None:
        norms.append(gradient.norm().item())

    model.a.weight.register_hook(record)
    return train(model=model, state=lambda: norms)


@more
def parameter_hook_keeps_gradients() -> Made:
    model, kept = Net(), {}
    model.a.weight.register_hook(lambda gradient: kept.update(a=gradient))
    return train(model=model, state=lambda: dict(kept))


@more
def parameter_hook_masks() -> Made:
    model = Net()
    mask = (torch.arange(16 * 6).reshape(16, 6) % 2).float()
    model.a.weight.register_hook(lambda gradient: gradient * mask)
    return train(model=model, change=at(3, mask.zero_))


@case
def parameter_hook_added_later() -> Made:
    model = Net()
    return train(model=model, change=at(3, model.a.weight.register_hook, lambda gradient: gradient * 0.1))


@more
def parameter_hook_removed_later() -> Made:
    model = Net()
    handle = model.a.weight.register_hook(lambda gradient: gradient * 0.1)
    return train(model=model, change=at(3, handle.remove))


@more
def parameter_hooks_clip_by_value() -> Made:
    model = Net()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return train(model=model, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))


@more
def parameter_hook_counts_and_switches() -> Made:
    model, calls = Net(), [0]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return gradient if calls[0] < 4 else gradient * 0.1

    model.b.weight.register_hook(hook)
    return train(model=model, state=lambda: calls[0])


@case
def activation_hook_in_the_forward() -> Made:
    options = {"factor": -1.0}

    class Reversed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            h.register_hook(lambda gradient: gradient * options["factor"])
            return self.b(h)

    return train(model=Reversed(), change=at(3, options.update, factor=0.1))


@more
def activation_hook_records() -> Made:
    norms: list[torch.Tensor] = []

    class Recorded(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            h.register_hook(lambda gradient: norms.append(gradient.norm()))
            return self.b(h)

    return train(model=Recorded(), state=lambda: norms)


@case
def activation_retains_its_gradient() -> Made:
    class Kept(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.h = torch.tanh(self.a(x))
            self.h.retain_grad()
            return self.b(self.h)

    model, norms = Kept(), []
    return train(model=model, after=lambda i: norms.append(float(model.h.grad.norm())), state=lambda: norms)


@more
def hook_on_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        found.register_hook(lambda gradient: gradient * 0.5)
        return found

    return train(loss)


@case
def post_accumulate_hook_clips() -> Made:
    model = Net()

    def clip(p: torch.Tensor) -> None:
        p.grad.clamp_(-0.01, 0.01)

    model.a.weight.register_post_accumulate_grad_hook(clip)
    return train(model=model)


@more
def post_accumulate_hook_added_later() -> Made:
    model = Net()

    def hook(p: torch.Tensor) -> None:
        p.grad.mul_(0.1)

    return train(model=model, change=at(3, model.a.weight.register_post_accumulate_grad_hook, hook))


@case
def optimizer_in_the_backward() -> Made:
    """Updates in post-accumulate hooks; the optimizer outside has the head only."""
    model = Net()
    inner = {p: sgd([p]) for p in model.a.parameters()}

    def hook(p: torch.Tensor) -> None:
        inner[p].step()
        inner[p].zero_grad()

    for p in model.a.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return train(model=model, optimizer=sgd(model.parameters()))


@more
def hook_on_several_gradients() -> Made:
    model, calls = Net(), []
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda gradients: calls.append(len(gradients))
    )
    return train(model=model, state=lambda: calls)


@case
def saved_tensors_packed() -> Made:
    packed = [0]

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed[0] += 1
        return x.to(torch.bfloat16)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(torch.float32)):
            return mse(m, b)

    return train(loss, state=lambda: packed[0])


@more
def saved_on_the_cpu() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return mse(m, b)

    return train(loss)


# ---- parameters that bring their hooks with them ----


def _shrink(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.1)


def _hooked(parameter: nn.Parameter, *, late: bool = False) -> nn.Parameter:
    new = nn.Parameter(parameter.detach().clone())
    if late:
        new.register_post_accumulate_grad_hook(_shrink)
    else:
        new.register_hook(lambda gradient: gradient * 0.1)
    return new


@case
def parameter_with_a_hook_takes_the_place_of_another() -> Made:
    model = Net()
    optimizer, prepared = sgd(model.parameters()), _hooked(model.a.weight)

    def change(i: int) -> None:
        if i == 3:
            prepared.data.copy_(model.a.weight)
            model.a.weight = optimizer.param_groups[0]["params"][0] = prepared

    return train(model=model, change=change, optimizer=optimizer)


@case
def parameter_with_a_late_hook_takes_the_place_of_another() -> Made:
    model = Net()
    optimizer, prepared = sgd(model.parameters()), _hooked(model.a.weight, late=True)

    def change(i: int) -> None:
        if i == 3:
            prepared.data.copy_(model.a.weight)
            model.a.weight = optimizer.param_groups[0]["params"][0] = prepared

    return train(model=model, change=change, optimizer=optimizer)
