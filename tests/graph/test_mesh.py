"""Mesh: plain data, and who stands where."""

from __future__ import annotations

import json

import pytest
import torch

from wholestep import Mesh, WholestepError
from wholestep.graph.mesh import Cut, Ranks


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_a_size_is_a_whole_number(size: object) -> None:
    with pytest.raises(WholestepError, match=r"Mesh\(tp=.*at least 1"):
        Mesh(tp=size)  # type: ignore[arg-type]


def test_groups_differ_in_one_axis() -> None:
    mesh = Mesh(dp=2, tp=3)
    assert mesh.num_ranks == 6 and str(mesh) == "Mesh(dp=2, tp=3)"
    assert list(mesh.groups("tp")) == [[0, 1, 2], [3, 4, 5]]
    assert list(mesh.groups("dp")) == [[0, 3], [1, 4], [2, 5]]
    assert mesh.coordinates(4) == {"dp": 1, "pp": 0, "tp": 1}
    with pytest.raises(WholestepError, match="no axis 'ep'"):
        mesh.size("ep")


def test_a_mesh_as_text() -> None:
    assert Mesh.read("tp=4") == Mesh(tp=4) and Mesh.read("dp=2, tp=4") == Mesh(dp=2, tp=4)
    for text in ("4", "tp", "tp=", "ep=2", "tp=2,tp=4", "tp=-1"):
        with pytest.raises(WholestepError, match="write it as tp=4"):
            Mesh.read(text)


@pytest.mark.parametrize("cut", [Cut(0, "tp"), Cut(1, "tp"), Cut(1, "tp", (4, 2), 2), Cut(-1, "tp", (6,), 2)], ids=str)
def test_parts_are_taken_and_put_back(cut: Cut) -> None:
    whole = torch.arange(4 * 12).reshape(4, 12)
    parts = [cut.own(whole, rank, 2) for rank in range(2)]
    assert torch.equal(cut.whole(parts), whole) and parts[0].is_contiguous()
    ranks = Ranks(Mesh(tp=2), {"w": cut})
    assert ranks.local_shape("w", whole.shape) == list(parts[0].shape) and ranks.local_shape("b", (3,)) == [3]
    assert Ranks.from_json(json.loads(json.dumps(ranks.to_json()))) == ranks
