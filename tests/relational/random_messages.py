"""Message functions put together at random, from a seed: the same operators whenever they are called.

Every decision is made by sizes without that of edges, so that a function does the same over any number of them. A few operators mix
edges, or count them: these have to be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep import relational as rel
from wholestep.relational import RelGraph

SIZES = (1, 2, 3, 4, 6)
TYPES = 3
Pool = list[Tensor]
"""All with edges in dimension 0."""


class Draws:
    """random.Random as far as it is needed, in Python that a tracer follows."""

    def __init__(self, seed: int) -> None:
        self.state = (seed * 2654435761 + 12345) % 2**31

    def random(self) -> float:
        self.state = (self.state * 1103515245 + 12345) % 2**31
        return (self.state >> 8) / 2**23

    def randrange(self, first: int, beyond: int | None = None) -> int:
        first, beyond = (0, first) if beyond is None else (first, beyond)
        return first + int(self.random() * (beyond - first))

    def choice(self, of: Sequence[Any]) -> Any:
        return of[self.randrange(len(of))]


def tensors(graph: RelGraph, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Features of nodes, parameters, features of edges."""
    generator = torch.Generator().manual_seed(seed)

    def some(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()

    nodes = {"x": some(graph.num_nodes, 6), "y": some(graph.num_nodes, 2, 3), "s": some(graph.num_nodes)}
    nodes["id"] = torch.randint(0, 5, (graph.num_nodes,), generator=generator)
    params = {"table": some(5, 4), "tables": some(graph.num_relations, 5, 3), "by_types": some(TYPES, TYPES, 2)}
    params |= {f"HH{a}": some(graph.num_relations, 2, 3, a) for a in SIZES}
    for letter, rows in (("R", graph.num_relations), ("T", TYPES)):
        params |= {f"{letter}{a}{b}": some(rows, a, b) for a in SIZES for b in SIZES}
        params |= {f"{letter}{a}": some(rows, a) for a in SIZES}
    params |= {f"N{a}{b}": some(a, b) for a in SIZES for b in SIZES} | {f"N{a}": some(a) for a in SIZES}
    return nodes, params, {"x": some(graph.num_edges, 3), "w": some(graph.num_edges)}


def message_of(seed: int, mixing: float = 0.03) -> Callable[[Any, Any], Tensor]:
    """`mixing`: how probable an operator is that does not work edge by edge."""

    def message(e: Any, p: Any) -> Tensor:
        choose = Draws(seed)
        pool: Pool = [e.src.x, e.dst.x, e.src.y, e.dst.y, e.src.s, e.x, e.w]
        for _ in range(choose.randrange(2, 10)):
            kind = choose.choice(_MIXED if choose.random() < mixing else _KINDS)
            x = choose.choice(pool[-3:] if choose.random() < 0.6 else pool)
            made = kind(choose, x, pool, e, p)
            if made is not None and made.dim() <= 4:
                pool.append(made if made.dtype == torch.float64 else made.double())
        return _end(choose, pool)

    return message


def _end(choose: Draws, pool: Pool) -> Tensor:
    body = choose.choice(pool[-3:])
    how = choose.randrange(0, 5)
    if how == 0:  # attention, or any weight
        weight = _flat(choose, choose.choice(pool))
        weight = rel.edge_softmax(weight, within_relation=choose.random() < 0.3) if choose.random() < 0.7 else weight
        return weight.reshape(-1, *[1] * (body.dim() - 1)) * body
    if how == 1 and body.dim() == 3:  # per head
        other = choose.choice(pool)
        logits = (_flat(choose, other)[:, None] * body.sum(-1)) if choose.random() < 0.5 else body.mean(-1)
        return body * rel.edge_softmax(logits).unsqueeze(-1)
    if how == 2:
        return body * _flat(choose, body).reshape(-1, *[1] * (body.dim() - 1))
    return body


def _flat(choose: Draws, x: Tensor) -> Tensor:
    """A number per edge."""
    return x if x.dim() == 1 else x.flatten(1)[:, choose.randrange(x.shape[1:].numel())]


def _dim(choose: Draws, x: Tensor) -> int:
    dim = choose.randrange(1, x.dim())
    return dim if choose.random() < 0.5 else dim - x.dim()


def _squeezed(x: Tensor) -> Tensor:
    """Of one edge alone the reference would lose its dimension."""
    return x.squeeze() if x.shape[0] > 1 else x.squeeze(tuple(range(1, x.dim())))


def _pointwise(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor:
    return choose.choice([
        torch.tanh, torch.sigmoid, torch.relu, torch.abs, torch.neg, torch.sin, F.gelu, F.leaky_relu, F.silu,
        lambda t: (t * 2 + 0.5) / 3, lambda t: t.clamp(-1, 1), lambda t: torch.tanh(t).exp(), lambda t: 1 - t,
        lambda t: torch.tanh(t) ** 2, lambda t: F.softplus(t), lambda t: t.float().double(), lambda t: t.clone(),
    ])(x)  # fmt: skip


def _binary(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor | None:
    y = choose.choice(pool)
    while y.dim() < x.dim():
        y = y.unsqueeze(choose.randrange(1, y.dim() + 1))
    while x.dim() < y.dim():
        x = x.unsqueeze(choose.randrange(1, x.dim() + 1))
    if any(a != b and 1 not in (a, b) for a, b in zip(x.shape[1:], y.shape[1:], strict=True)):
        return None
    how = choose.randrange(7)
    return [
        lambda: x + y, lambda: x * y, lambda: x - y, lambda: torch.maximum(x, y), lambda: torch.where(x > y, x, y * 2),
        lambda: x / (1 + y * y), lambda: torch.lerp(x, y, 0.3),
    ][how]()  # fmt: skip


def _params(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor | None:
    """A parameter of all, of the relation, or of a type, along the last dimension."""
    if x.dim() < 2 or x.shape[-1] not in SIZES:
        return None
    wide, how = x.shape[-1], choose.randrange(4)
    if how == 0:
        v = getattr(p, f"N{wide}")
    else:
        letter, ids = (("R", e.type), ("T", e.src.type), ("T", e.dst.type))[how - 1]
        v = getattr(p, f"{letter}{wide}")[ids]
        v = v.reshape(-1, *[1] * (x.dim() - 2), wide)
    return choose.choice([lambda: x + v, lambda: x * v, lambda: v * x, lambda: (x * v).sum(-1), lambda: x - v])()


def _product(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor | None:
    if x.dim() < 2 or x.shape[-1] not in SIZES:
        return None
    wide, out = x.shape[-1], choose.choice(SIZES)
    letter, ids = choose.choice([("N", None), ("R", e.type), ("R", e.type), ("T", e.src.type), ("T", e.dst.type)])
    matrix = getattr(p, f"{letter}{wide}{out}")
    if ids is None:
        how = choose.randrange(3)
        return [lambda: x @ matrix, lambda: F.linear(x, matrix.t(), getattr(p, f"N{out}")), lambda: (x * 1.5) @ matrix][
            how
        ]()
    if choose.random() < 0.2:
        matrix = matrix * 0.5 + torch.tanh(matrix)
    of_edges = matrix[ids]
    if x.dim() == 2:
        return choose.choice([
            lambda: (x.unsqueeze(1) @ of_edges).squeeze(1), lambda: torch.einsum("ni,nio->no", x, of_edges),
            lambda: torch.bmm(x[:, None], of_edges).reshape(-1, out),
            lambda: (of_edges.transpose(1, 2) @ x.unsqueeze(2)).squeeze(2),
            lambda: (x.unsqueeze(2) * of_edges).sum(1), lambda: _squeezed(x.unsqueeze(1) @ of_edges),
        ])() if out > 1 else torch.einsum("ni,nio->no", x, of_edges)  # fmt: skip
    if x.dim() == 3:
        if x.shape[1:] == (2, 3) and choose.random() < 0.5:
            heads = getattr(p, f"HH{out}")[e.type]
            if choose.random() < 0.5:
                return torch.einsum("ehi,ehio->eho", x, heads)
            return (x.unsqueeze(2) @ heads).squeeze(2)
        return choose.choice([lambda: x @ of_edges, lambda: torch.einsum("ehi,eio->eho", x, of_edges)])()
    return None


def _einsum(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor | None:
    if x.dim() != 2 or x.shape[1] not in SIZES:
        return None
    wide = x.shape[1]
    basis = getattr(p, f"N{wide}2")
    coefficients = p.R3[e.type]
    return choose.choice([
        lambda: torch.einsum("ei,io->eo", x, basis), lambda: torch.einsum("ei,ej->eij", x, coefficients),
        lambda: torch.einsum("eb,bo->eo", coefficients, p.N34), lambda: torch.einsum("ei,eb,io->ebo", x, coefficients, basis),
    ])()  # fmt: skip


def _view(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor | None:
    if x.dim() < 2:
        return x.unsqueeze(-1)
    dim = _dim(choose, x)
    options: list[Callable[[], Tensor]] = [
        lambda: x.unsqueeze(dim), lambda: x.flatten(1), lambda: x.squeeze(dim), lambda: x.transpose(1, -1),
        lambda: x.narrow(dim, 0, max(1, x.shape[dim] - 1)), lambda: x.select(dim, 0), lambda: x.flip(dim),
        lambda: torch.cat(x.chunk(2, dim)[::-1], dim), lambda: torch.stack(x.unbind(dim), 1), lambda: x[:, ..., :1].expand_as(x),
        lambda: x.repeat(1, *[2] * (x.dim() - 1)) if x.shape[1:].numel() < 9 else x, lambda: x[:],
        lambda: _squeezed(x.unsqueeze(1)),
    ]  # fmt: skip
    if x.shape[-1] == 6:
        options.append(lambda: x.reshape(*x.shape[:-1], 2, 3))
    if x.dim() == 3:
        options.append(lambda: x.permute(0, 2, 1))
    return choose.choice(options)()


def _reduction(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor | None:
    if x.dim() < 2:
        return None
    dim, keep = _dim(choose, x), choose.random() < 0.5
    return choose.choice([
        lambda: x.sum(dim, keepdim=keep), lambda: x.mean(dim, keepdim=keep), lambda: x.amax(dim, keepdim=keep),
        lambda: x.logsumexp(dim, keepdim=keep), lambda: x.max(dim, keepdim=keep)[0], lambda: (x * x).sum(dim),
        lambda: (x * x + 1).norm(dim=dim, keepdim=keep), lambda: x.var(dim, unbiased=False), lambda: x.flatten(1).sum(-1),
    ])()  # fmt: skip


def _normed(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor | None:
    if x.dim() < 2 or x.shape[-1] not in SIZES:
        return None
    dim, wide = _dim(choose, x), x.shape[-1]
    return choose.choice([
        lambda: F.softmax(x, dim), lambda: F.log_softmax(x, dim), lambda: F.layer_norm(x, x.shape[1:]),
        lambda: F.layer_norm(x, (wide,), getattr(p, f"N{wide}"), getattr(p, f"N{wide}")),
        lambda: F.rms_norm(x, (wide,), getattr(p, f"N{wide}")),
        lambda: F.normalize(x + 0.3, dim=dim), lambda: x.cumsum(dim), lambda: F.pad(x, (1, 0)) if wide < 5 else x,
        lambda: x - x.mean(dim, keepdim=True), lambda: F.glu(x, -1) if wide % 2 == 0 else x,
    ])()  # fmt: skip


def _cases(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor:
    tail = [1] * (x.dim() - 1)
    return choose.choice([
        lambda: torch.where(x > 0, x, 0.5), lambda: x.masked_fill(x < 0, 0.1), lambda: x * (x > 0.2),
        lambda: torch.where((e.type % 2 == 0).reshape(-1, *tail), x, -x), lambda: x * e.type.reshape(-1, *tail),
        lambda: torch.where((e.src.type == e.dst.type).reshape(-1, *tail), x, x * 0.5), lambda: x + torch.zeros_like(x),
        lambda: x + x.new_ones(x.shape), lambda: x.detach() * 2, lambda: x * x.detach(), lambda: (x + 1).mul_(2),
    ])()  # fmt: skip


def _tables(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor:
    return choose.choice([
        lambda: p.table[e.src.id], lambda: p.tables[e.type, e.src.id], lambda: p.tables[e.type, e.dst.id],
        lambda: p.by_types[e.src.type, e.dst.type], lambda: F.embedding(e.type, p.R3), lambda: p.N6.expand(x.shape[0], 6),
        lambda: torch.cat([p.R2[e.type], p.N4.expand(x.shape[0], 4)], 1), lambda: p.R4.index_select(0, e.type),
        lambda: p.T3[(e.src.type + 1) % 3], lambda: torch.cat([e.src.x, torch.ones(x.shape[0], 1, dtype=x.dtype)], -1)[:, -2:],
    ])()  # fmt: skip


def _softmax(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor | None:
    return rel.edge_softmax(x, within_relation=choose.random() < 0.3) if x.dim() <= 3 else None


def _mixing(choose: Draws, x: Tensor, pool: Pool, e: Any, p: Any) -> Tensor:
    return choose.choice([
        lambda: x - x.mean(0), lambda: x.cumsum(0), lambda: x.flip(0), lambda: x.roll(1, 0), lambda: F.softmax(x, 0),
        lambda: x / x.shape[0], lambda: x + x.sum(0, keepdim=True), lambda: x * x.sum(), lambda: x.roll(1),
        lambda: x * torch.arange(x.shape[0], dtype=x.dtype).reshape(-1, *[1] * (x.dim() - 1)), lambda: x.sort(0)[0],
        lambda: F.pad(x, (0, 0) * (x.dim() - 1) + (1, -1)) if x.shape[0] else x, lambda: F.normalize(x, dim=0),
        lambda: x.reshape(-1).flip(0).reshape(x.shape),
        lambda: torch.cat([x[1:], x[:1]]), lambda: F.layer_norm(x.t(), (x.shape[0],)).t() if x.dim() == 2 else x.cumprod(0),
    ])()  # fmt: skip


_KINDS = (
    _pointwise, _pointwise, _binary, _binary, _params, _params, _product, _product, _product, _view, _view, _reduction, _normed,
    _cases, _tables, _einsum, _softmax,
)  # fmt: skip
_MIXED = (_mixing,)
