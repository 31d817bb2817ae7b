"""Edits of an fx graph whose time grows with what they change, not with what reads it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx


def replace_each(graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> None:
    """Who reads a key reads its value, and the keys leave the graph. No value is a key.

    A reader is rewritten once, whatever it reads: node by node, the output of a step, which returns every parameter, would be
    written again for each of them.
    """
    readers = dict.fromkeys(user for node in replaced for user in node.users if user not in replaced)
    for reader in readers:
        reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), lambda node: replaced.get(node, node))
    for node in reversed(replaced):
        graph.erase_node(node)


def is_unread(node: fx.Node) -> bool:
    """Whether it may go: nobody reads it, and it does nothing besides."""
    return not node.users and not node.is_impure()


def remove_unread(graph: fx.Graph) -> None:
    """`Graph.eliminate_dead_code`, which asks every node for its effects, also those that somebody reads."""
    graph.eliminate_dead_code(lambda node: not is_unread(node))
