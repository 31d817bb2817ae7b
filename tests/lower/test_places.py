"""What lies where it lay: by the memory itself, not by an address that may be given again."""

from __future__ import annotations

import weakref

import pytest
import torch

from wholestep.lower.places import Places


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
