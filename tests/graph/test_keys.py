"""Keys of values with the layers they mean, there and back."""

from __future__ import annotations

import pytest

from wholestep.graph.keys import joined_key, split_key


@pytest.mark.parametrize(
    ("key", "base", "wanted"),
    [
        ("layers.*/gelu", "layers.*/gelu", None),
        ("layers.*/gelu@2", "layers.*/gelu", [0, 1]),
        ("layers.*/gelu#1@[0,3]", "layers.*/gelu#1", [0, 3]),
        ("layers.*/gelu@[0, 3]", "layers.*/gelu", [0, 3]),
        ("layers.*/gelu@[]", "layers.*/gelu@[]", None),
    ],
)
def test_a_key_says_which_layers(key: str, base: str, wanted: list[int] | None) -> None:
    found, layers = split_key(key)
    assert found == base and (None if layers is None else list(layers)) == wanted


def test_and_back() -> None:
    assert joined_key("k", {0, 1, 2}, 3) == "k"
    assert joined_key("k", {1, 0}, 3) == "k@2"
    assert joined_key("k", {2, 0}, 3) == "k@[0,2]"
    for wanted in ([0], [1], [0, 2, 3]):
        layers = split_key(joined_key("k", wanted, 5))[1]
        assert layers is not None and list(layers) == wanted
