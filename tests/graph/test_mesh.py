"""Mesh: plain data, and who stands where."""

from __future__ import annotations

import pytest

from wholestep import Mesh, WholestepError


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
