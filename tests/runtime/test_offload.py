"""`with wholestep.offload(model, host=...)`: the gradients of eager PyTorch to the last bit, one copy per storage."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import wholestep
from wholestep.errors import BadOption
from wholestep.runtime.offload import Offloaded, _NoLink
from wholestep.tiers.pool import Pool

offload_module = importlib.import_module("wholestep.runtime.offload")
pool_module = importlib.import_module("wholestep.tiers.pool")


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.heads = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)  # one storage
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(x)))


def model_and_input(dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).to(dtype), torch.randn(4, 9, 32).to(dtype)


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_gradients_are_the_same(dtype: torch.dtype, mode: str) -> None:
    model, x = model_and_input(dtype)
    model.train(mode == "train")
    wanted = gradients(model, model(x).square().mean())
    for _ in range(2):
        with wholestep.offload(model, host="64MiB", least=1) as moved:
            loss = model(x).square().mean()
            assert moved.pool.taken > 0
            found = gradients(model, loss)
        assert all(map(torch.equal, found, wanted)) and moved.moved_bytes > 0
        del loss
        gc.collect()
        assert moved.pool.taken == 0, "buffers come back when the backward pass is over"


def test_a_storage_is_copied_once_and_parameters_and_inputs_stay() -> None:
    model, x = model_and_input()
    x.requires_grad_()
    storages: dict[int, int] = {}
    seen: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        storages[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = model(x)
    stays = {t.untyped_storage()._cdata for t in (*model.parameters(), x)}
    expected = sum(size for key, size in storages.items() if key not in stays)
    del kept
    with wholestep.offload(model, host="64MiB", least=1) as moved:
        out = model(x)
    assert moved.moved_bytes == expected < sum(t.nbytes for t in seen)
    assert out.requires_grad


def test_a_full_pool_keeps() -> None:
    model, x = model_and_input()
    wanted = gradients(model, model(x).sum())
    with wholestep.offload(model, host="130KiB", least=1) as moved:
        assert all(map(torch.equal, gradients(model, model(x).sum()), wanted))
    assert moved.kept_bytes > 0 and moved.pool.held <= 130 << 10


def test_twice_through_one_graph_checkpoints_and_second_derivatives() -> None:
    model, x = model_and_input()

    def double(on: bool) -> list[torch.Tensor]:
        with wholestep.offload(model, host="64MiB", least=1) if on else torch.enable_grad():
            out = model(x).square().mean()
            first = torch.autograd.grad(out, list(model.parameters()), retain_graph=True)
            again = torch.autograd.grad(out, list(model.parameters()), create_graph=False)
            y = x.clone().requires_grad_()
            part = checkpoint(lambda y: model[0].down(F.gelu(model[0].up(y))), y, use_reentrant=False)
            inner = torch.autograd.grad((F.gelu(model[1].up(part)) ** 2).sum(), y, create_graph=True)[0]
            second = torch.autograd.grad(inner.square().sum(), y)[0]
        return [*first, *again, second]

    assert all(map(torch.equal, double(True), double(False)))


def test_values_that_are_written_in_place() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(5, 8)

    def loss() -> torch.Tensor:
        h = layer(x)
        kept = h.exp()  # saved, then written to behind the copy
        return (kept * 2).add_(1).relu_().sum() + kept.sum()

    wanted = gradients(layer, loss())
    with wholestep.offload(layer, host="1MiB", least=1):
        assert all(map(torch.equal, gradients(layer, loss()), wanted))


def test_a_storage_that_is_saved_anew_after_a_write_has_a_copy_of_its_own() -> None:
    layer = nn.Linear(6, 6)
    x = torch.randn(3, 6)
    with wholestep.offload(layer, host="8MiB", least=1) as moved:
        h = layer(x).detach().requires_grad_() * 1.0
        first = h.square()
        copies = moved.moved_bytes
        with torch.no_grad():
            h.mul_(2)
        second = h.square()
        assert moved.moved_bytes > copies
        (first.sum() + second.sum()).backward()


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_parts_of_a_storage_that_are_written_one_after_the_other(kind: Any) -> None:
    """torch cuts the gates of a cell out of one storage, and each part counts its own writes: one copy is not that of the next."""
    torch.manual_seed(0)
    layer, x = kind(8, 6, 2, batch_first=True), torch.randn(3, 5, 8, requires_grad=True)

    def both(on: bool) -> list[torch.Tensor]:
        with wholestep.offload(layer, host="8MiB", least=1) if on else torch.enable_grad():
            loss = layer(x)[0].square().sum()
            inner = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        return [*torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True), *gradients(layer, inner)]

    assert all(map(torch.equal, both(True), both(False)))


def test_a_tensor_with_another_count_of_writes_has_a_copy_of_its_own() -> None:
    layer, scale = nn.Linear(6, 6), nn.Parameter(torch.randn(3, 6))
    with wholestep.offload(layer, host="8MiB", least=1) as moved:
        h = layer(torch.randn(3, 6)).detach().clone()
        seen = h.data  # of the same storage, and its count stays zero
        first = h * scale
        h.mul_(2)
        second = seen * scale
    assert moved.moved_bytes == 2 * h.nbytes and first.shape == second.shape
    assert torch.equal(torch.autograd.grad(second.sum(), scale)[0], h)


class _Slow(_NoLink):
    """A link whose copies take a while, in which other threads run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waits = 0

    def wait(self, memory: torch.Tensor, event: Any) -> None:
        time.sleep(1e-3)
        self.waits += 1

    def bring(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        time.sleep(1e-3)
        target.copy_(source)

    def is_over(self, event: Any) -> bool:
        time.sleep(1e-4)
        return True


class _Late:
    """A link whose copies out are over only when they are told to be."""

    def __init__(self) -> None:
        self.over = False
        self.waited: list[torch.Tensor] = []

    def wait_out(self, gone: Any, memory: torch.Tensor) -> None:
        self.waited.append(memory)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        target.copy_(source)
        return self

    def bring(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        target.copy_(source)

    def wait(self, memory: torch.Tensor, event: Any) -> None:
        return None

    def drop(self, memory: torch.Tensor) -> None:
        return None

    def is_over(self, event: Any) -> bool:
        return self.over


def test_a_write_while_the_copy_is_on_its_way_raises() -> None:
    layer, x = nn.Linear(6, 6), torch.randn(3, 6)
    with wholestep.offload(layer, host="8MiB", least=1) as moved:
        moved.link = late = _Late()  # type: ignore[assignment]
        h = layer(x)
        out = h.exp()
        loss = out.sum()
        with torch.no_grad():
            out.mul_(2)
        late.over = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation while it left the card"):
            loss.backward()


def test_a_write_is_noticed_before_the_copy_is_known_to_be_over() -> None:
    """The backward pass asks while the copy is still on its way: what is written to now is what would be copied."""
    model = nn.Linear(8, 8)
    with wholestep.offload(model, host="1MiB", least=1) as moved:
        moved.link = _Late()  # type: ignore[assignment]
        held = model(torch.randn(4, 8))
        out = held.exp()
        loss = out.sum()
    with torch.no_grad():
        out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_of_the_host_is_taken_once_for_all_contexts_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """To pin it takes longer than a step; another amount is another memory."""
    taken: list[int] = []

    def counted(num_bytes: int, *, pinned: bool) -> torch.Tensor:
        taken.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(pool_module, "host_memory", counted)
    model, x = model_and_input()
    wanted = gradients(model, model(x).square().mean())
    seen, links = [], []
    for amount in ("64MiB", "64MiB", "64MiB", "32MiB"):
        with wholestep.offload(model, host=amount, least=1) as moved:
            loss = model(x).square().mean()
        assert all(map(torch.equal, gradients(model, loss), wanted)) and moved.moved_bytes > 0
        del loss
        gc.collect()
        seen.append(len(taken))
        links.append(moved.link)
    assert seen[0] == seen[1] == seen[2] < seen[3] and links[0] is links[2] is not links[3]
    other, _ = model_and_input()
    with wholestep.offload(other, host="32MiB", least=1) as moved:
        assert moved.pool is not offload_module._LENT[model][0]


def test_what_leaves_holds_little_memory_while_the_link_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead of the device, so no copy is over yet: memory is let go behind a wait, and writes are still noticed."""
    monkeypatch.setattr(offload_module, "IN_FLIGHT_BYTES", 3000)
    late = _Late()
    one = Offloaded(torch.device("cpu"), Pool(1 << 20, pinned=False), late, least=1)  # type: ignore[arg-type]
    values = [torch.randn(256, requires_grad=True) * 2 for _ in range(10)]
    packed = [one.pack(value) for value in values]
    assert sum(value.nbytes for value in values) > 3 * 3000
    assert sum(stored.num_bytes for stored in one.held) <= 3000 and len(late.waited) == 8
    assert all(entry.stored.held is None for entry in packed[:8]) and packed[9].stored.held is not None
    with torch.no_grad():
        values[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        one.unpack(packed[0])
    late.over = True
    assert torch.equal(one.unpack(packed[1]), values[1])


def test_what_comes_ahead_is_bounded_and_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "IN_FLIGHT_BYTES", 3000)
    link = _Counted(torch.device("cpu"))
    one = Offloaded(torch.device("cpu"), Pool(1 << 20, pinned=False), link, least=1)
    values = [torch.randn(256, requires_grad=True) * 2 for _ in range(8)]
    packed = [one.pack(value) for value in values]
    assert torch.equal(one.unpack(packed[7]), values[7]) and link.brought == 3, "itself, and the two before it"
    for number in (5, 6, 4, 3, 2, 1, 0):  # not quite in the other order
        assert torch.equal(one.unpack(packed[number]), values[number])
    assert link.brought == 8, "what was asked for does not come again"
    for number in reversed(range(8)):
        assert torch.equal(one.unpack(packed[number]), values[number])
    assert link.brought == 16, "a second backward pass asks for all once more"


class _Counted(_NoLink):
    """How many storages were brought back."""

    brought = 0

    def bring(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        self.brought += 1
        target.copy_(source)


def test_tensors_of_another_device_stay() -> None:
    """The streams of the link belong to the model's device, and order nothing on another."""
    one = Offloaded(torch.device("meta"), Pool(1 << 20, pinned=False), _NoLink(torch.device("meta")), least=1)
    tensor = torch.randn(64, requires_grad=True) * 2
    assert one.pack(tensor) is tensor and one.moved_bytes == 0


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns after every few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any], count: int) -> list[Any]:
    """What several threads return that start together; the first error is raised."""
    start = threading.Barrier(count)

    def begin(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [done.result() for done in [pool.submit(begin, number) for number in range(count)]]


def test_a_context_in_each_of_several_threads(impatient: None) -> None:
    """Of two models, and of one and the same."""
    pairs = [model_and_input() for _ in range(2)]
    pairs.append(pairs[0])
    wanted = [torch.autograd.grad(model(x).square().mean(), list(model.parameters())) for model, x in pairs]

    def train(number: int) -> list[tuple[torch.Tensor, ...]]:
        model, x = pairs[number]
        found = []
        for _ in range(4):
            with wholestep.offload(model, host="64MiB", least=1):
                loss = model(x).square().mean()
            found.append(torch.autograd.grad(loss, list(model.parameters())))
        return found

    for grads, expected in zip(at_once(train, 3), wanted, strict=True):
        assert all(torch.equal(a, b) for one in grads for a, b in zip(one, expected, strict=True))


def test_backward_passes_in_several_threads_share_what_one_forward_saved(impatient: None) -> None:
    """Each asks for the same storages, some while others are on their way back."""
    model, x = model_and_input()
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(model(x).square().mean(), parameters)
    for _ in range(3):
        with wholestep.offload(model, host="64MiB", least=1):
            loss = model(x).square().mean()
        for found in at_once(lambda _, loss=loss: torch.autograd.grad(loss, parameters, retain_graph=True), 4):
            assert all(map(torch.equal, found, wanted))


def test_one_storage_is_asked_for_in_several_threads() -> None:
    link = _Slow()
    one = Offloaded(torch.device("cpu"), Pool(1 << 20, pinned=False), link, least=1)
    saved = torch.randn(8, 8, requires_grad=True).exp()
    packed = [one.pack(saved), one.pack(saved[1:])]
    for found in at_once(lambda number: [one.unpack(view) for view in packed], 4):
        assert torch.equal(found[0], saved) and torch.equal(found[1], saved[1:])
    assert one.moved_bytes == saved.nbytes and link.waits == 8, "a thread may be on a stream of its own"


def test_a_forward_beside_a_backward(impatient: None) -> None:
    """A pipeline: the next micro-batch is saved while another thread asks for the last one."""
    model, x = model_and_input()
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(model(x).square().mean(), parameters)
    with wholestep.offload(model, host="64MiB", least=1) as moved, ThreadPoolExecutor(2) as others:
        grads = [
            others.submit(torch.autograd.grad, loss, parameters)
            for loss in (model(x).square().mean() for _ in range(8))
        ]
        assert all(torch.equal(a, b) for found in grads for a, b in zip(found.result(), wanted, strict=True))
    del grads
    gc.collect()
    assert moved.pool.taken == 0


def test_threads_that_a_forward_starts_compute_as_ever(impatient: None) -> None:
    """As torch's DataParallel does. Saved tensors are a thread's own affair in PyTorch: theirs stay where they are."""
    model, x = model_and_input()
    wanted = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    with wholestep.offload(model, host="64MiB", least=1):
        parts = at_once(lambda _: model(x).square().mean(), 3)
        found = torch.autograd.grad(sum(parts), list(model.parameters()))
    torch.testing.assert_close([3 * grad for grad in wanted], list(found))


def test_a_buffer_that_comes_back_in_the_middle_of_a_request() -> None:
    """A garbage collection drops values in any thread, also while that thread asks the pool for memory."""
    pool = Pool(4 << 20, pinned=False)
    buffer = pool.take(1 << 20)
    assert buffer is not None
    with pool.lock:
        pool.give_back(buffer)
    assert pool.taken == 0 and pool.take(1 << 20) is buffer


def test_contexts_within_contexts_and_errors_inside() -> None:
    model, x = model_and_input()
    wanted = gradients(model, model(x).square().mean())
    with wholestep.offload(model, host="64MiB", least=1) as outer:
        half = model[0](x)
        with wholestep.offload(model, host="64MiB", least=1) as inner:
            half = model[1](half)
        with pytest.raises(ZeroDivisionError), wholestep.offload(model, host="1MiB", least=1):
            _ = model(x).sum() / 0, 1 // 0
        loss = model[2](half).square().mean()
    assert outer.moved_bytes > 0 and inner.moved_bytes > 0 and not model._forward_pre_hooks
    assert all(map(torch.equal, gradients(model, loss), wanted))
    assert all(map(torch.equal, gradients(model, model(x).square().mean()), wanted))


def test_autocast_and_inference_inside() -> None:
    model, x = model_and_input()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients(model, model(x).square().mean())
    with wholestep.offload(model, host="64MiB", least=1) as moved:
        with torch.inference_mode():
            model(x)
        with torch.no_grad():
            model(x)
        assert moved.moved_bytes == 0
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
    assert moved.moved_bytes > 0
    assert all(map(torch.equal, gradients(model, loss), wanted))


def test_inputs_and_buffers_that_are_not_dense() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5)
            self.register_buffer("fixed", torch.eye(4).to_sparse())

        def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.fixed, torch.sparse.mm(adjacency, self.linear(x)).exp())

    model, x, adjacency = Spread(), torch.randn(4, 6), torch.randn(4, 4).relu().to_sparse()
    wanted = gradients(model, model(adjacency, x).sum())
    with wholestep.offload(model, host="64MiB", least=1):
        loss = model(adjacency, x).sum()
    assert all(map(torch.equal, gradients(model, loss), wanted))


def test_what_is_gone_is_forgotten() -> None:
    """One context around a whole training: inputs of past steps are not remembered."""
    model = nn.Linear(4, 4)
    with wholestep.offload(model, host="1MiB", least=1) as moved:
        for _ in range(20):
            model(torch.randn(3, 4)).sum().backward()
        assert len(moved.stays) <= 4 and len(moved.order) <= 4


def test_bad_input_is_one_line() -> None:
    model, _ = model_and_input()
    with pytest.raises(BadOption, match="is not an amount"), wholestep.offload(model, host="lots"):
        pass
    with pytest.raises(BadOption, match=r"host='900TiB': this machine has"), wholestep.offload(model, host="900TiB"):
        pass
    with pytest.raises(BadOption, match="give the model"), wholestep.offload(3, host="1MiB"):  # type: ignore[arg-type]
        pass


@pytest.mark.gpu
def test_the_gradients_are_the_same_on_a_gpu() -> None:
    model, x = model_and_input()
    model, x = model.cuda(), x.cuda()
    wanted = gradients(model, model(x).square().mean())
    for _ in range(3):
        with wholestep.offload(model, host="64MiB", least=1) as moved:
            found = gradients(model, model(x).square().mean())
        assert all(map(torch.equal, found, wanted)) and moved.moved_bytes > 0
