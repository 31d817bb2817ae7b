"""Repeated layers are found by their integer names and equal operators."""

from __future__ import annotations

import operator

from torch import fx

from wholestep.graph.layers import (
    MIN_LAYER_OPERATIONS,
    is_number,
    layer_pattern,
    layers_of,
    numbered_module,
    numbered_prefixes,
    part_borders,
    without_calls,
)


def nodes_for(paths: list[tuple[str, int, str]]) -> list[fx.Node]:
    """(module path, number of operators, phase) -> nodes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = []
    for path, count, phase in paths:
        for _ in range(count):
            node = graph.call_function(operator.neg, (x,))
            node.meta["custom"] = {"module": path, "phase": phase}
            made.append(node)
    return made


def found(paths):
    return sorted(set(layers_of(nodes_for(paths)).values()))


def test_outermost_repeated_path_wins():
    big = MIN_LAYER_OPERATIONS
    assert found([(f"encoder.layer.{i}.mlp.{j}", big, "forward") for i in range(3) for j in range(2)]) == [
        "encoder.layer.0",
        "encoder.layer.1",
        "encoder.layer.2",
    ]


def test_unequal_stages_with_equal_blocks():
    big = MIN_LAYER_OPERATIONS
    paths = [("stages.0.blocks.0", big, "forward"), ("stages.0.blocks.1", big, "forward")]
    paths += [(f"stages.1.blocks.{i}", big + 1, "forward") for i in range(3)]
    assert found(paths) == [*(f"stages.0.blocks.{i}" for i in range(2)), *(f"stages.1.blocks.{i}" for i in range(3))]


def test_small_or_single_layers_are_none():
    assert found([(f"mlp.{i}", 2, "forward") for i in range(5)]) == []
    assert found([("h.0", 20, "forward")]) == []
    assert found([("h.0", 20, "forward"), ("h.1", 30, "forward")]) == []


def test_backward_nodes_follow_their_layer():
    paths = [("h.0", 9, "forward"), ("h.1", 9, "forward"), ("h.1", 3, "backward")]
    nodes = nodes_for(paths)
    assert layers_of(nodes)[nodes[-1]] == "h.1"


def test_borders_are_the_first_nodes_of_parts():
    """A node without a module stays where it is; outside layers forward and backward are one part."""
    big = MIN_LAYER_OPERATIONS
    nodes = nodes_for(
        [("embed", 2, "forward"), ("h.0", big, "forward"), ("h.1", big, "forward"), ("head", 1, "forward")]
        + [
            ("head", 1, "backward"),
            ("h.1.mlp", 2, "backward"),
            ("", 1, "backward"),
            ("h.0", 2, "backward"),
            ("", 2, "update"),
        ]
    )
    for node in nodes:
        if not node.meta["custom"]["module"]:
            del node.meta["custom"]["module"]
    places = [nodes.index(node) for node in part_borders(nodes)]
    assert places == [2, 2 + big, 2 + 2 * big, 4 + 2 * big, 7 + 2 * big, 9 + 2 * big]


def test_numbers_in_paths():
    assert numbered_prefixes("encoder.layer.3.mlp.0") == ("encoder.layer.3", "encoder.layer.3.mlp.0")
    assert numbered_prefixes("h.3#2.mlp") == ("h.3#2",) and numbered_prefixes(None) == numbered_prefixes("") == ()
    (inside, outside) = nodes_for([("encoder.layer.3#2.mlp.0", 1, "forward"), ("head", 1, "forward")])
    assert numbered_module(inside) == "encoder.layer.3#2" and numbered_module(outside) is None
    assert is_number("3") and is_number("3#2") and not is_number("h3") and not is_number("")
    assert without_calls("h.3#2.mlp#4") == "h.3.mlp" and layer_pattern("h.3.mlp.0.act") == "h.*.mlp.*.act"
