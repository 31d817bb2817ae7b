"""Edits of a graph: what reads them is rewritten once, and what is read is asked for nothing."""

from __future__ import annotations

import operator
from unittest import mock

from torch import fx

from wholestep.graph.edit import remove_unread, replace_each


def chain(length: int) -> tuple[fx.Graph, fx.Node, list[fx.Node]]:
    """A graph that returns `length` negations of its input."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    made = [graph.call_function(operator.neg, (given,)) for _ in range(length)]
    graph.output((tuple(made), {"again": made[0]}))
    return graph, given, made


def test_a_reader_of_many_replaced_values_is_rewritten_once() -> None:
    graph, given, made = chain(5)
    with mock.patch.object(fx, "map_arg", wraps=fx.map_arg) as rewritten:
        replace_each(graph, dict.fromkeys(made[:4], given))
    assert rewritten.call_count == 1
    output = next(iter(reversed(graph.nodes)))
    assert output.args == (((given,) * 4 + (made[4],), {"again": given}),)
    assert list(graph.nodes) == [given, made[4], output]
    assert set(given.users) == {made[4], output}
    graph.lint()


def test_replaced_values_may_read_each_other() -> None:
    graph = fx.Graph()
    given = graph.placeholder("given")
    one = graph.call_function(operator.pos, (given,))
    two = graph.call_function(operator.pos, (one,))
    graph.output(two)
    replace_each(graph, {one: given, two: given})
    assert next(iter(reversed(graph.nodes))).args == (given,)
    assert len(graph.nodes) == 2


def test_only_what_nobody_reads_is_asked_for_its_effects() -> None:
    graph, given, made = chain(3)
    unread = graph.call_function(operator.pos, (made[0],))
    also = graph.call_function(operator.neg, (unread,))
    output = next(node for node in graph.nodes if node.op == "output")
    output.prepend(unread)
    output.prepend(also)
    asked: list[fx.Node] = []
    real = fx.Node.is_impure
    with mock.patch.object(fx.Node, "is_impure", lambda node, *more: asked.append(node) or real(node, *more)):
        remove_unread(graph)
    assert list(graph.nodes) == [given, *made, output]
    assert set(asked) == {output, also, unread}
