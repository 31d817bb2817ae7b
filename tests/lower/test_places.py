"""What lies where it lay: by the memory itself, not by an address that may be given again."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.lower.places import Places, copy_in


@pytest.mark.parametrize("change", ["memory", "size", "strides", "freed"])
def test_a_tensor_whose_memory_is_another_has_moved(change):
    table = torch.ones(4, 4)
    places = Places([0])
    places.met([table])
    assert not places.moved([table]) and tuple(places.found) == (0,)
    if change == "memory":
        table.data = torch.ones(4, 4)
    elif change == "freed":
        table.untyped_storage().resize_(0)
    else:
        table = table[:2] if change == "size" else table.t()
    assert places.moved([table])
    places.met([table])
    assert not places.found


def test_memory_is_not_kept_before_there_is_a_recording_and_not_taken_for_what_comes_after():
    places = Places([0])
    for _ in range(50):  # allocators give the same addresses again
        given = torch.ones(8)
        freed = weakref.ref(given)
        places.met([given])
        del given
        assert freed() is None
    assert not places.found


def test_a_batch_is_copied_by_one_launch_per_dtype():
    class Launches(TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    kinds = [torch.int32, torch.float32, torch.int32, torch.int16, torch.float32, torch.int16, torch.int32, torch.bool]
    given = [torch.arange(n + 2).to(kind) for n, kind in enumerate(kinds)]
    given[1] = torch.arange(6.0).view(2, 3).t()  # lies otherwise than its buffer
    buffers = [torch.zeros(t.shape, dtype=t.dtype) for t in given]
    with Launches() as launches:
        copy_in(buffers, given)
    assert sorted(launches.names) == ["aten::_foreach_copy_"] * 2 + ["aten::copy_"] * 3
    assert all(torch.equal(*pair) for pair in zip(buffers, given, strict=True))


@pytest.mark.parametrize("given", [torch.zeros(4), torch.zeros(3, dtype=torch.int64)])
def test_a_batch_of_another_size_or_dtype_is_refused(given):
    with pytest.raises(ValueError, match=r"recorded for a batch of \(3,\) torch.float32, not \("):
        copy_in([torch.zeros(3)], [given])


@pytest.mark.gpu
def test_a_batch_is_copied_into_buffers_on_a_gpu():
    kinds = [torch.int32, torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64]
    given = [torch.randint(0, 2, (n,), device="cuda").to(kind) for kind in kinds for n in (0, 1, 7, 100_000)]
    given.append(torch.rand(5, 7, device="cuda").t())
    buffers = [torch.full_like(t, 1, memory_format=torch.contiguous_format) for t in given]
    copy_in(buffers, given)
    assert all(torch.equal(*pair) for pair in zip(buffers, given, strict=True))
