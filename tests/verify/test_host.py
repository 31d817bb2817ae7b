"""Eager PyTorch with what it keeps on the host: the same bits, and nothing but what was asked for stays on the device."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from tests.verify.small_models import Mlp, Normed, batches, loss_fn
from torch import nn
from torch.utils.checkpoint import checkpoint

from wholestep.capture.subject import make_subject
from wholestep.verify import host
from wholestep.verify.reference import Reference, live_reference, reference_gradients


@pytest.fixture(autouse=True)
def everything_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SMALL_BYTES", 1)


class Checkpointed(nn.Module):
    """Its own saved tensors are recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=False, preserve_rng_state=False)


def same(one: Reference, other: Reference) -> bool:
    gradients = one.gradients.keys() == other.gradients.keys() and all(
        torch.equal(g, other.gradients[n]) for n, g in one.gradients.items()
    )
    return gradients and torch.equal(one.loss, other.loss) and one.activation_rms == other.activation_rms


@pytest.mark.parametrize("build", [Mlp, Normed])
@pytest.mark.parametrize("run", [reference_gradients, live_reference])
def test_values_are_the_same_wherever_they_wait(build: type[nn.Module], run: Any) -> None:
    model, batch = build(), batches(1)[0]
    subject = make_subject(model, loss_fn, None)
    kept, near, far = (run(subject, batch, 1, 0, 0, num_sites=2, room=room) for room in (None, 1 << 20, 0))
    assert same(kept, near) and same(kept, far)
    assert kept.moved_bytes == near.moved_bytes == 0 < far.moved_bytes
    partly = run(subject, batch, 1, 0, 0, num_sites=2, room=far.moved_bytes // 2)
    assert same(kept, partly) and far.moved_bytes // 2 <= partly.moved_bytes < far.moved_bytes


def test_weights_do_not_travel() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    model = Alone()
    saved = host.Saved(0, dict(model.named_parameters()))
    with saved:
        x = torch.ones(2, 4, requires_grad=True)
        (model(x) * 1.0).sum().backward()
    assert saved.moved_bytes == 4 * x.numel(), "x, which the weight's gradient needs; not the weight"


def test_what_two_operators_save_travels_once() -> None:
    x = torch.randn(5, 5, requires_grad=True)
    gradients = []
    for saved in (contextlib.nullcontext(), host.Saved(0, {"x": x})):
        with saved:
            middle = x.exp()  # saves its result
            loss = (middle.square() + middle.sin() * middle).sum()  # three that save it too
            gradients += torch.autograd.grad(loss, [x])
    assert torch.equal(*gradients) and isinstance(saved, host.Saved)
    assert saved.moved_bytes == 2 * x.nbytes, "exp's result and sin's"


def test_what_was_written_since_travels_again() -> None:
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        middle = x * 2
        first = middle.square()
        with torch.no_grad():
            middle.add_(1)  # behind autograd's back: the version counts
        return (first + middle.square()).sum()

    x = torch.ones(4, requires_grad=True)
    with host.Saved(0, {}):
        saved = torch.autograd.grad(loss_of(x), [x])[0]
    assert torch.equal(saved, torch.full((4,), 2 * 2 * 2.0 + 2 * 2 * 3.0))


def test_memory_that_is_used_again_is_not_taken_for_what_was_there() -> None:
    """The storage of a saved tensor may go, and another take its address."""
    x = torch.randn(64, 64, requires_grad=True)
    with host.Saved(0, {}):
        losses = [((x * k).square() * k).sum() for k in range(1, 20)]
        found = torch.autograd.grad(sum(losses), [x])[0]
    torch.testing.assert_close(found, sum(2 * k**3 for k in range(1, 20)) * x.detach())


def test_what_makes_its_values_again_is_left_to_it() -> None:
    batch = batches(1)[0]
    subject = make_subject(Checkpointed(), loss_fn, None)
    kept, far = (reference_gradients(subject, batch, 1, 0, 0, num_sites=4, room=room) for room in (None, 0))
    assert same(kept, far)


def test_hooks_come_before_the_way_to_the_host() -> None:
    model, batch = Mlp(), batches(1)[0]
    model.head.bias.register_hook(lambda g: g * 3)
    unused = nn.Parameter(torch.ones(3))
    model.register_parameter("unused", unused)
    subject = make_subject(model, loss_fn, None)
    kept, far = (live_reference(subject, batch, 1, 0, 0, num_sites=2, room=room) for room in (None, 0))
    assert same(kept, far) and "unused" not in far.gradients and isinstance(far.gradients, host.OnHost)
    assert len(model.head.bias._backward_hooks) == 1 and not model.head.weight._backward_hooks


def test_zeros_give_way() -> None:
    zeros, numbers = torch.zeros(5), torch.arange(5.0)
    view = torch.zeros(10)[:5]
    with host.zeros_set_aside([zeros, numbers, view]):
        assert zeros.untyped_storage().nbytes() == 0
        assert numbers.sum() == 10 and view.untyped_storage().nbytes() == 40, "others may look at what a view looks at"
    assert torch.equal(zeros, torch.zeros(5)) and torch.equal(numbers, torch.arange(5.0))
    with pytest.raises(KeyError), host.zeros_set_aside([zeros]):
        raise KeyError
    assert torch.equal(zeros, torch.zeros(5))


def test_zeros_come_back_when_memory_did_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left without memory, they would be written to by the compiled step: an illegal access, and the process is lost."""
    zeros, made = torch.zeros(5), []

    def eager() -> None:
        activation = torch.ones(3)
        made.append(weakref.ref(activation))
        raise torch.OutOfMemoryError

    limit, resize = [0.5], torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        if size and (made[0]() is not None or limit[-1] < 1.0):
            raise torch.OutOfMemoryError
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: limit[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limit.append(share))
    with pytest.raises(torch.OutOfMemoryError), host.zeros_set_aside([zeros]):
        eager()
    assert limit == [0.5, 1.0, 0.5] and torch.equal(zeros, torch.zeros(5))


def test_copies_of_zeros_take_one() -> None:
    assert host.copied_to_host(torch.zeros(4, 4)).untyped_storage().nbytes() == 4
    source = torch.arange(6.0).view(2, 3)
    copy = host.copied_to_host(source)
    source.zero_()
    assert copy.sum() == 15
