"""The matcher: what Slapo's got wrong, what makes a match one that can be taken out, and brute force on random graphs."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from wholestep.errors import BadOption
from wholestep.schedule.match import apart, matches
from wholestep.schedule.operators import call_of
from wholestep.schedule.pattern import Pattern, trace_pattern


def found(function: Callable[..., Any], pattern: Callable[..., Any]) -> list[set[str]]:
    """The names of the calls of every match."""
    graph = fx.symbolic_trace(function).graph
    return [{node.name for node in match.nodes} for match in matches(graph, trace_pattern(pattern))]


def test_unconnected_nodes_never_match() -> None:
    assert found(lambda a, b: (torch.relu(a), torch.tanh(b)), lambda x: torch.tanh(torch.relu(x))) == []
    assert found(lambda a: torch.tanh(torch.relu(a)), lambda x: torch.tanh(torch.relu(x))) == [{"relu", "tanh"}]


def test_a_repeated_input_is_one_value() -> None:
    assert found(lambda x, b: F.gelu(x + b), lambda x: F.gelu(x + x)) == []
    assert found(lambda x, b: F.gelu(x + x), lambda x: F.gelu(x + x)) == [{"add", "gelu"}]
    assert found(lambda x: F.gelu(x + x), lambda x, b: F.gelu(x + b)) == [{"add", "gelu"}]


@pytest.mark.parametrize(
    "written",
    [lambda x, b: torch.add(b, x), lambda x, b: x.add(b), lambda x, b: b + x, lambda x, b: torch.add(x, other=b)],
)
def test_the_ways_to_write_a_call_are_one(written: Callable[..., Any]) -> None:
    assert len(found(lambda x, b: F.relu(written(x, b)), lambda x, b: torch.relu(x + b))) == 1


def test_order_matters_where_it_does() -> None:
    assert found(lambda a, b: torch.relu(a) - b, lambda x, y: x - torch.relu(y)) == []
    assert found(lambda a, b: torch.relu(a) * b, lambda x, y: x * torch.relu(y)) == [{"relu", "mul"}]
    weighted = fx.symbolic_trace(lambda a, b: torch.add(torch.relu(a), b, alpha=2)).graph
    assert matches(weighted, trace_pattern(lambda x, y: torch.add(y, torch.relu(x), alpha=2))) == []
    assert len(matches(weighted, trace_pattern(lambda x, y: torch.add(torch.relu(x), y, alpha=2)))) == 1


def test_an_attribute_that_is_computed_is_a_call() -> None:
    transposed = fx.Graph()
    x, w = transposed.placeholder("x"), transposed.placeholder("w")
    flipped = transposed.call_function(getattr, (w, "T"))
    transposed.output(transposed.call_function(torch.matmul, (x, flipped)))
    assert len(matches(transposed, trace_pattern(lambda x, w: x @ w.T))) == 1
    assert matches(transposed, trace_pattern(lambda x, w: x @ w.mT)) == []
    with pytest.raises(BadOption, match="reads the attribute 'shape' of a value"):
        trace_pattern(lambda x: x * x.shape[-1])


def test_constants_are_equal() -> None:
    assert found(lambda x: x + -0.0, lambda x: x + 0.0) == []
    assert found(lambda x: torch.add(x, float("nan")), lambda x: x + float("nan")) == [{"add"}]
    assert found(lambda x: x.softmax(-1), lambda x: torch.softmax(x, 1)) == []
    assert found(lambda x: x.softmax(-1), lambda x: F.softmax(x, dim=-1)) == [{"softmax"}]
    assert found(lambda x: x * 2, lambda x: x * 2.0) == []
    assert found(lambda x: F.dropout(x, 0.2), lambda x: F.dropout(x, 0.5)) == []
    assert found(lambda x: F.dropout(x, 0.2), lambda x, p: F.dropout(x, p)) == [{"dropout"}]
    assert found(lambda x: x.view(2, -1), lambda x: x.view((2, -1))) == [{"view"}]


def test_what_is_read_elsewhere_is_not_taken_out() -> None:
    def escapes(x: Any, w: Any) -> Any:
        hidden = F.linear(x, w)
        return F.gelu(hidden), hidden.sum()

    assert found(escapes, lambda x, w: F.gelu(F.linear(x, w))) == []
    assert found(lambda x: (torch.relu(x), torch.relu(x).sum()), lambda x: torch.relu(x)) == [{"relu"}, {"relu_1"}]


def test_writes_in_between_are_seen() -> None:
    def written(x: Any, w: Any) -> Any:
        hidden = F.linear(x, w)
        x.add_(1)
        return F.gelu(hidden)

    def written_before(x: Any, w: Any) -> Any:
        x.add_(1)
        return F.gelu(F.linear(x, w))

    pattern = lambda x, w: F.gelu(F.linear(x, w))  # noqa: E731
    assert found(written, pattern) == []
    assert found(written_before, pattern) == [{"linear", "gelu"}]


def test_every_operator_of_python_that_writes_is_seen() -> None:
    """`x &= y` writes to x as `x += y` does."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    found = [name for name in dir(operator) if name[0] == "i" and hasattr(torch.Tensor, f"__{name.rstrip('_')}__")]
    written = [name for name in found if name not in ("invert", "index", "inv")]
    assert {"iadd", "iand", "ior", "ixor", "imod", "ifloordiv", "ilshift", "irshift"} <= set(written)
    for name in written:
        calls = [graph.call_function(getattr(operator, name), (x, y)), graph.call_method(f"__{name}__", (x, y))]
        assert all(call is not None and call.writes for call in map(call_of, calls)), name


@pytest.mark.parametrize("written", [lambda m, x: ~m, lambda m, x: m.bitwise_not(), lambda m, x: torch.bitwise_not(m)])
def test_an_inverted_mask_is_one_however_it_is_written(written: Callable[..., Any]) -> None:
    assert len(found(written, lambda m: ~m)) == 1


def test_a_write_through_a_view_is_seen() -> None:
    def through_a_view(x: Any) -> Any:
        row = x[0]
        hidden = torch.relu(x)
        row.mul_(2)
        return torch.tanh(hidden)

    assert found(through_a_view, lambda x: torch.tanh(torch.relu(x))) == []
    # a result that shares memory with an input, and is written later
    assert found(lambda x: x.view(-1).add_(1), lambda x: x.view(-1)) == []
    assert found(lambda x: x.view(-1).add(1), lambda x: x.view(-1)) == [{"view"}]


def test_calls_in_place_do_not_match_those_that_are_not() -> None:
    assert found(lambda x: F.relu(x, inplace=True), lambda x: F.relu(x)) == []
    assert found(lambda x, b: F.gelu(x.add_(b)), lambda x, b: F.gelu(x + b)) == []


def test_autocast_does_not_begin_inside_of_a_match() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    hidden = graph.call_function(torch.relu, (x,))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output(graph.call_function(torch.tanh, (hidden,)))
    assert matches(graph, trace_pattern(lambda x: torch.tanh(torch.relu(x)))) == []


def test_several_outputs_share_an_input() -> None:
    def projections(x: Any, a: Any, b: Any, c: Any) -> Any:
        return F.linear(x, a), F.linear(x, b), F.linear(c, b)

    pattern = trace_pattern(lambda x, q, k: (F.linear(x, q), F.linear(x, k)))
    graph = fx.symbolic_trace(projections).graph
    assert [[n.name for n in m.outputs] for m in matches(graph, pattern)] == [["linear", "linear_1"]]

    def fed(x: Any, a: Any, b: Any) -> Any:
        first = F.linear(x, a)
        return F.linear(x, torch.relu(first))  # the second weight comes from the first result

    assert matches(fx.symbolic_trace(fed).graph, pattern) == []


def test_matches_that_share_a_call_are_taken_once() -> None:
    graph = fx.symbolic_trace(lambda x: torch.relu(torch.relu(torch.relu(x)))).graph
    every = matches(graph, trace_pattern(lambda x: torch.relu(torch.relu(x))))
    assert len(every) == 2 and len(apart(every)) == 1


def gelu(x: Any) -> Any:
    """Somebody's own, of the name of one of torch's."""
    return x


def test_a_function_of_the_same_name_is_another_one() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(gelu, (graph.placeholder("x"),)))
    assert matches(graph, trace_pattern(lambda x: F.gelu(x))) == []
    named = torch.library.Library("test_match_own", "DEF")
    named.define("gelu(Tensor x) -> Tensor")
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.test_match_own.gelu.default, (graph.placeholder("x"),)))
    assert matches(graph, trace_pattern(lambda x: F.gelu(x))) == []
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.gelu.default, (graph.placeholder("x"),)))
    assert len(matches(graph, trace_pattern(lambda x: F.gelu(x)))) == 1


def test_what_nobody_knows_may_write_to_what_it_is_given() -> None:
    for own, count in ((gelu, 0), (torch.sin, 1)):
        graph = fx.Graph()
        x = graph.placeholder("x")
        hidden = graph.call_function(torch.relu, (x,))
        between = graph.call_function(own, (x,))
        graph.output((graph.call_function(torch.tanh, (hidden,)), between))
        assert len(matches(graph, trace_pattern(lambda x: torch.tanh(torch.relu(x))))) == count


CAPTURED = torch.ones(3)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (lambda x: x + CAPTURED, "captures a tensor"),
        (lambda x: x.add_(1), "writes in place"),
        (lambda x: x if x.sum() > 0 else -x, "cannot be read as a pattern"),
        (lambda x: x, "must return what its operators compute"),
        (lambda *xs: xs[0] + 1, r"takes \*args"),
        (lambda x, y: (torch.relu(x), torch.tanh(y)), "share nothing"),
        (torch.nn.ReLU(), "ReLU is no pattern"),
    ],
)
def test_what_is_no_pattern(pattern: Any, said: str) -> None:
    with pytest.raises(BadOption, match=said):
        trace_pattern(pattern)


# ---- random graphs against brute force ----

UNARY = (torch.relu, torch.tanh)
BINARY = (torch.add, torch.sub)


def random_graph(choose: random.Random, inputs: int, calls: int) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of so many calls, each of values before it; a third of the numbers in it are constants."""
    graph = fx.Graph()
    values: list[Any] = [graph.placeholder(f"x{i}") for i in range(inputs)]
    made: list[fx.Node] = []
    for _ in range(calls):
        if choose.random() < 0.5:
            node = graph.call_function(choose.choice(UNARY), (choose.choice(values),))
        else:
            other = choose.choice([1, 2]) if choose.random() < 0.25 else choose.choice(values)
            pair = [choose.choice(values), other]
            node = graph.call_function(choose.choice(BINARY), tuple(pair))
        values.append(node)
        made.append(node)
    return graph, made


def random_pattern(choose: random.Random) -> Pattern | None:
    """Half of them with one output, the others with all values that nobody reads."""
    graph, made = random_graph(choose, choose.randint(1, 2), choose.randint(1, 3))
    unread = [node for node in made if not node.users]
    graph.output(unread[0] if len(unread) == 1 else tuple(unread))
    module = fx.GraphModule({}, graph)
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    if any(not node.users for node in inputs):
        return None
    function = module.forward
    try:
        namespace: dict[str, Any] = {}
        names = ", ".join(node.name for node in inputs)
        exec(f"def pattern({names}): return forward({names})", {"forward": function}, namespace)
        return trace_pattern(namespace["pattern"])
    except BadOption:  # outputs that share nothing
        return None


def planted(choose: random.Random, graph: fx.Graph, pattern: Pattern) -> list[fx.Node]:
    """The pattern's calls on values of a graph, put at its end."""
    values = list(graph.nodes)
    copies: dict[fx.Node, fx.Node] = {node: choose.choice(values) for node in pattern.inputs}
    for node in pattern.calls:
        args = [copies[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
        if node.target is torch.add and choose.random() < 0.5:
            args.reverse()
        copies[node] = graph.call_function(node.target, tuple(args))
    return [copies[node] for node in pattern.calls]


def brute_force(graph: fx.Graph, pattern: Pattern) -> set[frozenset[fx.Node]]:
    """Every assignment of the pattern's calls to calls of the graph, tried; nothing of the matcher's is used."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    wanted = list(pattern.calls)
    found = set()
    for chosen in itertools.permutations(nodes, len(wanted)):
        if any(a.target is not _target(pattern, b) for a, b in zip(chosen, wanted)):
            continue
        calls = dict(zip(wanted, chosen))
        if any(_edges_hold(calls, order) for order in _all_orders(wanted)) and _can_go(calls, pattern):
            found.add(frozenset(chosen))
    return found


def _target(pattern: Pattern, node: fx.Node) -> Any:
    return node.target


def _all_orders(wanted: list[fx.Node]) -> Any:
    """Which of the commutative calls have their operands the other way round."""
    turns = [(False, True) if node.target in (torch.add, torch.mul) else (False,) for node in wanted]
    return [dict(zip(wanted, turn)) for turn in itertools.product(*turns)]


def _edges_hold(calls: dict[fx.Node, fx.Node], order: dict[fx.Node, bool]) -> bool:
    bound: dict[fx.Node, Any] = {}
    for node, there in calls.items():
        theirs = list(there.args)[::-1] if order[node] else list(there.args)
        for mine, value in zip(node.args, theirs, strict=True):
            if isinstance(mine, fx.Node) and mine in calls:
                if value is not calls[mine]:
                    return False
            elif isinstance(mine, fx.Node):
                kept = bound.setdefault(mine, value)
                if (kept is not value) if isinstance(kept, fx.Node) or isinstance(value, fx.Node) else kept != value:
                    return False
            elif isinstance(value, fx.Node) or mine != value:
                return False
    return True


def _can_go(calls: dict[fx.Node, fx.Node], pattern: Pattern) -> bool:
    inside = set(calls.values())
    results = {calls[node] for node in pattern.outputs}
    if any(user not in inside for node in inside - results for user in node.users):
        return False
    read = {value for node in inside for value in node.all_input_nodes} - inside
    return not any(_reaches(out, read, inside) for out in results)


def _reaches(out: fx.Node, goals: set[fx.Node], inside: set[fx.Node]) -> bool:
    """Whether a value outside that depends on `out` is one of the goals."""
    users = [user for user in out.users if user not in inside]
    return any(user in goals or _reaches(user, goals, inside) for user in users)


def test_the_matcher_is_brute_force_on_random_graphs() -> None:
    """The patterns go through the tracer, which spells calls as it likes; targets are compared as they are there."""
    choose = random.Random(16)
    compared = places = 0
    while compared < 300:
        pattern = random_pattern(choose)
        if pattern is None:
            continue
        graph, made = random_graph(choose, 2, choose.randint(3, 6))
        if compared % 2:
            made += planted(choose, graph, pattern)
        graph.output(tuple(node for node in made if not node.users))
        ours = {frozenset(match.nodes) for match in matches(graph, pattern)}
        expected = brute_force(graph, pattern)
        assert ours == expected, (str(graph), [str(call_of(node)) for node in pattern.calls])
        compared += 1
        places += len(expected)
    assert places > 150  # the comparison is not about nothing
