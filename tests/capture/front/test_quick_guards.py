"""What guards look at is found as Dynamo's own code finds it."""

from __future__ import annotations

import types
from typing import Any

import pytest
from torch._dynamo.source import AttrSource, DictGetItemSource, GetItemSource, LocalSource

from wholestep.capture.front import quick_guards


def test_values_are_those_of_the_texts() -> None:
    layers = {"0": types.SimpleNamespace(scale=[1, 2]), "1": types.SimpleNamespace(scale=[3, 4])}
    scope = {"L": {"model": types.SimpleNamespace(layers=layers)}, "G": {}}
    cache: dict[Any, Any] = {}
    for name in layers:
        layer = DictGetItemSource(AttrSource(LocalSource("model"), "layers"), name)
        source = GetItemSource(AttrSource(layer, "scale"), 1)
        text = source.name if isinstance(source.name, str) else source.name()
        assert source.get_value(scope, {}, cache) == eval(text, scope) == layers[name].scale[1]
        assert cache[layer] is layers[name]


def test_what_is_not_there_raises_and_leaves_nothing_behind() -> None:
    names: dict[str, Any] = {}
    source = AttrSource(AttrSource(LocalSource("model"), "missing"), "scale")
    with pytest.raises(AttributeError):
        source.get_value({"L": {"model": 1}, "G": {}}, names, {})
    assert not names


def test_equal_texts_are_compiled_once() -> None:
    places = [AttrSource(LocalSource(name), "a_name_that_nobody_else_has") for name in ("one", "two")]
    scope = {"L": dict.fromkeys(("one", "two"), types.SimpleNamespace(a_name_that_nobody_else_has=1))}
    before = quick_guards._compiled.cache_info().misses
    for place in places:
        assert place.get_value(scope, {}, {}) == 1
    assert quick_guards._compiled.cache_info().misses == before + 1
