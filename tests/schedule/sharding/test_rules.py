"""Each rule alone: loss and gradients of 2 and 4 ranks against the function as it was written, in float64; or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.schedule.sharding.ranks import check
from torch.utils.checkpoint import checkpoint

from wholestep.errors import WholestepError
from wholestep.graph.mesh import Cut

Case = tuple[Callable[..., Any], dict[str, tuple[int, ...]], tuple[Any, ...], dict[str, int]]


def reals(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ids(*shape: int, below: int = 8) -> torch.Tensor:
    found = torch.randint(0, below, shape)
    found.view(-1)[0], found.view(-1)[-1] = 0, below - 1
    return found


def column_row(p: Any, x: Any) -> Any:
    hidden = F.gelu(F.linear(x, p["a"], p["ab"]))
    return (F.linear(hidden, p["b"], p["bb"]) + x).square().mean()


def transposed_weights(p: Any, x: Any) -> Any:
    """As attributes."""
    hidden = F.gelu(x @ p["a"].T + p["ab"])
    return (hidden @ p["b"].mT + p["bb"] + x).square().mean()


def heads(p: Any, x: Any) -> Any:
    """Attention of 4 heads, written out."""
    q, k, v = (F.linear(x, p[n]).view(2, 5, 4, 4).transpose(1, 2) for n in "qkv")
    chances = torch.softmax(q @ k.transpose(-1, -2) / 2 + p["bias"], -1)
    out = (F.dropout(chances, 0.3) @ v).transpose(1, 2).reshape(2, 5, 16)
    return F.linear(out, p["o"]).square().mean()


def fused_heads(p: Any, x: Any) -> Any:
    """q, k and v in one weight, as GPT-2 has them."""
    q, k, v = (F.linear(x, p["qkv"], p["b"])).split(16, dim=2)
    q, k, v = (one.view(2, 5, 4, 4).transpose(1, 2) for one in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
    return F.linear(out.transpose(1, 2).reshape(2, 5, 16), p["o"]).square().mean()


def fused_by_view(p: Any, x: Any) -> Any:
    """As vision transformers do."""
    q, k, v = F.linear(x, p["qkv"]).reshape(2, 5, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(q, k, v)
    return F.linear(out.transpose(1, 2).reshape(2, 5, 16), p["o"]).square().mean()


def fused_unequal(p: Any, x: Any) -> Any:
    """More query heads than key heads in one weight: blocks of 32, 16 and 16."""
    q, k, v = F.linear(x, p["qkv"]).split([32, 16, 16], dim=-1)
    q = q.view(2, 5, 8, 4).transpose(1, 2)
    k, v = (one.view(2, 5, 4, 4).transpose(1, 2) for one in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return F.linear(out.transpose(1, 2).reshape(2, 5, 32), p["o"]).square().mean()


def few_keys(p: Any, x: Any) -> Any:
    """Two heads of keys for eight of queries, and a mask that learns."""
    q = F.linear(x, p["q"]).view(2, 5, 8, 2).transpose(1, 2)
    k, v = (F.linear(x, p[n]).view(2, 5, 2, 2).transpose(1, 2) for n in "kv")
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=p["bias"].expand(2, -1, -1, -1), enable_gqa=True, dropout_p=0.1
    )
    return F.linear(out.transpose(1, 2).reshape(2, 5, 16), p["o"]).square().mean()


def repeated_keys(p: Any, x: Any) -> Any:
    """Heads of keys repeated by hand, in three ways."""
    q = F.linear(x, p["q"]).view(2, 5, 8, 2).transpose(1, 2)
    k, v = (F.linear(x, p[n]).view(2, 5, 4, 2).transpose(1, 2) for n in "kv")
    k = k[:, :, None].expand(2, 4, 2, 5, 2).reshape(2, 8, 5, 2)
    v = torch.repeat_interleave(v, 2, dim=1)
    return (torch.softmax(q @ k.transpose(-2, -1), -1) @ v).square().mean()


def rotary(p: Any, x: Any) -> Any:
    q = F.linear(x, p["q"]).view(2, 5, 4, 4).transpose(1, 2)
    angle = torch.arange(5, dtype=torch.float64)[:, None] * torch.ones(4, dtype=torch.float64)
    turned = torch.cat((-q[..., 2:], q[..., :2]), dim=-1)
    return (q * angle.cos() + turned * angle.sin()).square().sum()


def vocabulary(p: Any, tokens: Any) -> Any:
    """Tied: embedding and head are one parameter."""
    hidden = torch.tanh(F.linear(F.embedding(tokens, p["e"]), p["w"]))
    return F.cross_entropy(F.linear(hidden, p["e"]).view(-1, 8), tokens.view(-1))


def losses(reduction: str, **options: Any) -> Callable[..., Any]:
    def run(p: Any, x: Any, target: Any) -> Any:
        weight = p["classes"].abs().detach() if options.get("weighted") else None
        rest = {name: value for name, value in options.items() if name != "weighted"}
        return F.cross_entropy(F.linear(x, p["w"]), target, weight, reduction=reduction, **rest).square().sum()

    return run


def pixels(p: Any, x: Any, target: Any) -> Any:
    """Classes in the middle: (rows, classes, places)."""
    return F.cross_entropy(torch.einsum("bpi,oi->bop", x, p["w"]), target, ignore_index=2)


def picked_loss(p: Any, x: Any, target: Any) -> Any:
    return F.nll_loss(F.log_softmax(F.linear(x, p["w"]), dim=-1), target)


def experts(p: Any, x: Any, counts: Any) -> Any:
    hidden = torch.ops.ws.grouped_mm(x, p["up"].transpose(-2, -1), counts)
    gate, up = hidden.chunk(2, dim=-1)
    return (torch.ops.ws.grouped_mm(F.silu(gate) * up, p["down"].transpose(-2, -1), counts) * p["s"]).square().mean()


def by_expert(p: Any, x: Any) -> Any:
    """Stacked experts by bmm and einsum, weighted by a router that is whole."""
    share = torch.softmax(F.linear(x, p["r"]), -1)
    hidden = torch.relu(torch.einsum("td,edf->etf", x, p["up"]))
    out = torch.bmm(hidden, p["down"])
    return (out * share.t()[..., None]).sum(0).square().mean()


def norms(p: Any, x: Any) -> Any:
    """Over a dimension that is cut."""
    hidden = F.layer_norm(F.linear(x, p["a"]), (8,), p["g"], p["b"])
    return (F.rms_norm(hidden, (8,), p["s"]) * p["a"].sum(1)).pow(3).mean()


def local_norms(p: Any, x: Any) -> Any:
    """Of each head, with one weight for all of them."""
    hidden = F.layer_norm(F.linear(x, p["a"]).view(3, 4, 4), (4,), p["g"])
    return F.rms_norm(hidden, (4,), p["s"]).pow(3).mean()


def reductions(p: Any, x: Any) -> Any:
    y = F.linear(x, p["a"])
    found = y.sum() + y.mean(-1).square().sum() + torch.logsumexp(y, -1).sum() + y.pow(2).mean(0).sum().sqrt()
    return found + (torch.softmax(y, -1) * p["g"]).sum(-1).square().mean() + y.max(0).values.square().sum()


def shapes(p: Any, x: Any) -> Any:
    y = F.linear(x, p["a"])
    flat = y.view(3, 5, 4, 2).permute(2, 0, 1, 3).flatten(0, 1).unsqueeze(1).repeat(1, 2, 1, 1).squeeze(-1)
    wide = torch.stack([y, y * 2], dim=0).transpose(0, -1).reshape(8, -1)
    cat = torch.cat([y, x[..., :8] * p["g"]], dim=-1).tile(1, 2)
    return flat.square().sum() + wide.mean() + (cat * torch.arange(64)[None, None, :32].repeat(1, 1, 1)).sum()


def slices(p: Any, x: Any) -> Any:
    y = F.linear(x, p["a"])
    first, second = y[..., :4], y[..., 4:]
    rows = y[torch.tensor([2, 0]), 1:3]
    return (
        (first * torch.sigmoid(second)).square().sum() + rows.square().sum() + y[:, 0].sum() + y.narrow(1, 1, 2).sum()
    )


def in_place(p: Any, x: Any) -> Any:
    y = F.linear(x, p["a"])
    y += p["g"]
    y.mul_(2.0)
    y = F.relu(y, inplace=True)
    return F.linear(y, p["o"]).add_(1.0).square().mean()


def undifferentiated(p: Any, x: Any) -> Any:
    """What is computed without gradients, and used with them, goes through `enter` twice."""
    with torch.no_grad():
        scale = F.linear(x * p["g"], p["a"]).abs().sum()
    return (F.linear(x * p["g"], p["a"]) / scale).square().sum()


def mixed(p: Any, x: Any) -> Any:
    """A residual stream, a norm weight used on whole values and on cut ones, a scalar, a value that is both."""
    y = x * p["g"]
    for _ in range(2):
        y = y + F.linear(torch.tanh(F.linear(y, p["a"]) * p["s"]), p["o"])
    return (y.square().mean() + (F.linear(y, p["a"]) * p["g"].sum()).sum()) * p["s"].squeeze()


def channels(p: Any, x: Any) -> Any:
    y = F.relu(F.conv2d(x, p["a"], p["b"], padding=1))
    return F.conv2d(y, p["c"], p["d"]).square().mean()


def normed_channels(p: Any, x: Any) -> Any:
    """Statistics of each channel, and of groups of them; what is not given is whole on every rank."""
    y = F.batch_norm(F.conv2d(x, p["a"]), None, None, p["g"], p["b"], training=True)
    y = F.relu(F.group_norm(y, 4, p["s"])) + F.instance_norm(y, weight=p["s"], eps=1e-3)
    return F.conv2d(y, p["c"]).square().mean()


def heads_bias(p: Any, x: Any) -> Any:
    """T5's relative positions, cut by heads."""
    places = (torch.arange(5)[:, None] - torch.arange(5)[None]).abs().clamp(max=3)
    bias = F.embedding(places, p["r"]).permute(2, 0, 1).unsqueeze(0)
    q = F.linear(x, p["q"]).view(2, 5, 4, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias, scale=1.0).square().mean()


def switched(p: Any, x: Any) -> Any:
    """Autocast inside of the loss."""
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(F.gelu(F.linear(x.float(), p["a"].float())), p["o"].float())
    return y.double().square().mean()


def checkpointed(p: Any, x: Any) -> Any:
    inside = lambda x: F.linear(F.gelu(F.linear(x * p["g"], p["a"])), p["o"])  # noqa: E731
    return (x + checkpoint(inside, x, use_reentrant=False)).square().mean()


def multihead(p: Any, x: Any, hidden: Any, weights: bool) -> Any:
    """nn.MultiheadAttention, of one input and of two, with masks of both kinds."""
    options = dict(
        training=True, need_weights=weights, key_padding_mask=hidden, attn_mask=torch.ones(5, 5).triu(1).bool()
    )
    rest = (16, 4, p["w"], p["b"], None, None, False, 0.2, p["o"], p["ob"])
    out, seen = F.multi_head_attention_forward(x, x, x, *rest, **options)
    other, _ = F.multi_head_attention_forward(out, x, x + 1, *rest, **options)
    return (out + other).square().mean() + (seen.square().sum() if weights else 0)


def gated(p: Any, x: Any) -> Any:
    y = F.glu(F.conv2d(x, p["a"], padding=1), dim=1)
    y = F.max_pool2d(F.conv2d(y, p["c"], p["d"], groups=8), 2)
    return (y * p["s"]).square().mean()


def two_by_view(p: Any, x: Any) -> Any:
    """Keys and values in one weight, as many as there are ranks."""
    k, v = F.linear(x, p["kv"]).unflatten(-1, (2, 4, 4)).permute(2, 0, 3, 1, 4)
    q = F.linear(x, p["q"]).unflatten(-1, (4, 4)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v)
    return F.linear(out.transpose(1, 2).flatten(2), p["o"]).square().mean()


def halves_by_view(p: Any, x: Any) -> Any:
    both = F.linear(x, p["a"], p["ab"]).view(3, 2, 8)
    return (F.silu(both[:, 0]) * both.select(1, 1)).square().mean()


def four_by_unbind(p: Any, x: Any) -> Any:
    one, two, three, four = F.linear(x, p["a"]).view(3, 4, 8).unbind(1)
    return (one * two + three.tanh() * four).square().mean()


def one_key(p: Any, x: Any) -> Any:
    """One head of keys and values for all queries."""
    q, k, v = (F.linear(x, p[n]).unflatten(-1, (-1, 4)).transpose(1, 2) for n in "qkv")
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).square().mean()


def hits(p: Any, x: Any, labels: Any) -> Any:
    """A loss, and how often it is right; equal values have the first place."""
    logits = F.linear(x, p["w"])
    return (
        F.cross_entropy(logits, labels),
        logits.argmax(-1),
        logits.round().argmax(1, keepdim=True),
        (logits * 0).argmax(1),
    )


MULTIHEAD = {"w": (48, 16), "b": (48,), "o": (16, 16), "ob": (16,)}
HIDDEN = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
LINEAR = {"a": (16, 8), "ab": (16,), "b": (8, 16), "bb": (8,)}
HEADS = {"q": (16, 8), "k": (16, 8), "v": (16, 8), "o": (8, 16), "bias": (1, 4, 1, 1)}
X, X3 = reals(3, 8), reals(2, 5, 8)
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
CASES: dict[str, Case] = {
    "column, row": (column_row, LINEAR, (X3,), {"a": 0, "b": 1}),
    "column, row, biases": (column_row, LINEAR, (X3,), {"a": 0, "ab": 0, "b": 1}),
    "transposed weights": (transposed_weights, LINEAR, (X3,), {"a": 0, "b": 1}),
    "a bias alone": (column_row, LINEAR, (X3,), {"ab": 0}),
    "the last bias": (column_row, LINEAR, (X3,), {"bb": 0}),
    "rows alone": (column_row, LINEAR, (X3,), {"a": 1, "b": 1}),
    "heads": (heads, HEADS, (X3,), {"q": 0, "k": 0, "v": 0, "o": 1}),
    "heads, bias cut": (heads, HEADS, (X3,), {"q": 0, "k": 0, "v": 0, "o": 1, "bias": 1}),
    "queries alone": (heads, HEADS, (X3,), {"q": 0}),
    "q, k, v in one": (fused_heads, {"qkv": (48, 8), "b": (48,), "o": (8, 16)}, (X3,), {"qkv": 0, "b": 0, "o": 1}),
    "q, k, v in one, bias whole": (fused_heads, {"qkv": (48, 8), "b": (48,), "o": (8, 16)}, (X3,), {"qkv": 0, "o": 1}),
    "q, k, v by a view": (fused_by_view, {"qkv": (48, 8), "o": (8, 16)}, (X3,), {"qkv": 0, "o": 1}),
    "two by a view": (two_by_view, {"kv": (32, 8), "q": (16, 8), "o": (8, 16)}, (X3,), {"kv": 0, "q": 0, "o": 1}),
    "halves by a view": (halves_by_view, {"a": (16, 8), "ab": (16,)}, (X,), {"a": 0, "ab": 0}),
    "four by unbind": (four_by_unbind, {"a": (32, 8)}, (X,), {"a": 0}),
    "one key": (one_key, {"q": (16, 8), "k": (4, 8), "v": (4, 8)}, (X3,), {"q": 0, "k": 0, "v": 0}),
    "hits": (hits, {"w": (8, 8)}, (X, ids(3)), {"w": 0}),
    "few keys in one": (fused_unequal, {"qkv": (64, 8), "o": (8, 32)}, (X3,), {"qkv": 0, "o": 1}),
    "few keys": (few_keys, {"q": (16, 8), "k": (4, 8), "v": (4, 8), "o": (8, 16), "bias": (1, 8, 5, 5)}, (X3,),
                 {"q": 0, "k": 0, "v": 0, "o": 1}),
    "few keys, whole": (few_keys, {"q": (16, 8), "k": (4, 8), "v": (4, 8), "o": (8, 16), "bias": (1, 8, 5, 5)}, (X3,),
                        {"q": 0, "o": 1, "bias": 1}),
    "repeated keys": (repeated_keys, {"q": (16, 8), "k": (8, 8), "v": (8, 8)}, (X3,), {"q": 0, "k": 0, "v": 0}),
    "rotary": (rotary, {"q": (16, 8)}, (X3,), {"q": 0}),
    "vocabulary": (vocabulary, {"e": (8, 4), "w": (4, 4)}, (ids(3, 5),), {"e": 0}),
    "vocabulary and width": (vocabulary, {"e": (8, 4), "w": (4, 4)}, (ids(3, 5),), {"e": 1}),
    "mean": (losses("mean"), {"w": (8, 8)}, (X, ids(3)), {"w": 0}),
    "sum, smoothed": (losses("sum", label_smoothing=0.2), {"w": (8, 8)}, (X, ids(3)), {"w": 0}),
    "none, ignored": (losses("none", ignore_index=7), {"w": (8, 8)}, (X, ids(3)), {"w": 0}),
    "weighted, smoothed": (losses("mean", weighted=True, label_smoothing=0.1, ignore_index=0), {"w": (8, 8), "classes": (8,)},
                           (X, ids(3)), {"w": 0}),
    "one row": (losses("mean"), {"w": (8, 8)}, (reals(8), torch.tensor(7)), {"w": 0}),
    "classes in the middle": (pixels, {"w": (8, 8)}, (X3, ids(2, 5)), {"w": 0}),
    "nll_loss": (picked_loss, {"w": (8, 8)}, (X, ids(3)), {"w": 0}),
    "experts": (experts, {"up": (3, 16, 8), "down": (3, 8, 8), "s": (5, 1)}, (reals(5, 8), ENDS), {"up": 1, "down": 2}),
    "experts by bmm": (by_expert, {"r": (3, 8), "up": (3, 8, 4), "down": (3, 4, 8)}, (X,), {"up": 2, "down": 1}),
    "norms over a cut": (norms, {"a": (8, 8), "g": (8,), "b": (8,), "s": (8,)}, (X,), {"a": 0, "g": 0}),
    "norms of heads": (local_norms, {"a": (16, 8), "g": (4,), "s": (4,)}, (X,), {"a": 0}),
    "reductions": (reductions, {"a": (8, 8), "g": (8,)}, (X,), {"a": 0}),
    "shapes": (shapes, {"a": (8, 8), "g": (8,)}, (reals(3, 5, 8),), {"a": 0}),
    "slices": (slices, {"a": (8, 8)}, (reals(3, 5, 8),), {"a": 0}),
    "in place": (in_place, {"a": (8, 8), "g": (8,), "o": (8, 8)}, (X,), {"a": 0, "o": 1}),
    "without gradients": (undifferentiated, {"a": (8, 8), "g": (8,)}, (X,), {"a": 0}),
    "mixed": (mixed, {"a": (8, 8), "g": (8,), "o": (8, 8), "s": (1,)}, (X,), {"a": 0, "o": 1}),
    "channels": (channels, {"a": (8, 3, 3, 3), "b": (8,), "c": (4, 8, 1, 1), "d": (4,)}, (reals(2, 3, 4, 4),), {"a": 0, "c": 1}),
    "norms of channels": (normed_channels, {"a": (8, 3, 1, 1), "g": (8,), "b": (8,), "s": (8,), "c": (4, 8, 1, 1)},
                          (reals(2, 3, 4, 4),), {"a": 0, "g": 0, "c": 1}),
    "positions by heads": (heads_bias, {"q": (16, 8), "r": (4, 4)}, (X3,), {"q": 0, "r": 1}),
    "autocast": (switched, {"a": (16, 8), "o": (8, 16)}, (X,), {"a": 0, "o": 1}),
    "multi-head": (multihead, MULTIHEAD, (reals(5, 2, 16), HIDDEN, False), {"w": 0, "b": 0, "o": 1}),
    "multi-head, weights": (multihead, MULTIHEAD, (reals(5, 2, 16), HIDDEN, True), {"w": 0, "o": 1}),
    "gates, channels, pools": (gated, {"a": (16, 3, 3, 3), "c": (8, 1, 1, 1), "d": (8,), "s": (8, 1, 1)}, (reals(2, 3, 4, 4),),
                               {"a": 0, "c": 0}),
    "checkpoint": (checkpointed, {"a": (16, 8), "g": (8,), "o": (8, 16)}, (X,), {"a": 0, "o": 1}),
}  # fmt: skip
ROUGH = {"autocast": 3e-2}
"""bf16 sums in another order."""


@pytest.mark.filterwarnings("ignore:.*stays whole")
@pytest.mark.parametrize("name", CASES)
def test_followed(name: str) -> None:
    function, shapes_, inputs, cuts = CASES[name]
    torch.manual_seed(0)
    parameters = {n: reals(*shape) for n, shape in shapes_.items()}
    given = {n: (dim, "tp") for n, dim in cuts.items()}
    found = check(function, parameters, inputs, given, 2, 4, tolerance=ROUGH.get(name, 1e-9))
    assert found.collectives


@pytest.mark.parametrize("padding", [None, 0, -1])
def test_a_cut_vocabulary_knows_every_id(padding: int | None) -> None:
    def looked_up(p: Any, tokens: Any) -> Any:
        rows = F.embedding(tokens, p["e"], padding)
        return (rows * torch.arange(1.0, 33.0).view(8, 4)).sum(), rows

    check(looked_up, {"e": reals(8, 4)}, (torch.arange(8),), {"e": (0, "tp")}, 2, 4)


def test_an_id_that_no_rank_has_fails_as_without_a_mesh() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        check(lambda p, t: F.embedding(t, p["e"]).sum(), {"e": reals(8, 4)}, (torch.tensor([1, 3]),), {"e": (0, "tp")}, 2,
              edit=lambda graph: _shift_ids(graph))  # fmt: skip


def _shift_ids(graph: Any) -> None:
    sub = next(n for n in graph.nodes if n.target is torch.sub)
    with graph.inserting_before(sub):
        moved = graph.call_function(torch.add, (sub.args[0], 5))
    for node in list(graph.nodes):
        if node is not moved and sub.args[0] in node.all_input_nodes and node is not sub:
            node.replace_input_with(sub.args[0], moved)
    sub.replace_input_with(sub.args[0], moved)


def refused(
    function: Callable[..., Any], shapes_: dict[str, tuple[int, ...]], inputs: tuple[Any, ...], cuts: dict[str, int]
) -> str:
    parameters = {n: reals(*shape) for n, shape in shapes_.items()}
    with pytest.raises(WholestepError) as caught:
        check(function, parameters, inputs, {n: (dim, "tp") for n, dim in cuts.items()}, 2)
    return str(caught.value)


REFUSALS: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]], tuple[Any, ...], dict[str, int], str]] = {
    "column after column": (lambda p, x: F.linear(F.linear(x, p["a"]), p["b"]).sum(), {"a": (8, 8), "b": (8, 8)}, (X,),
                            {"a": 0, "b": 0}, "row after column"),
    "no rule": (lambda p, x: torch.linalg.qr(F.linear(x, p["a"]))[1].sum(), {"a": (8, 8)}, (X,), {"a": 0}, "all_gather"),
    "sorted": (lambda p, x: F.linear(x, p["a"]).sort(-1)[0][:, 0].sum(), {"a": (8, 8)}, (X,), {"a": 0}, "sort along it"),
    "one place": (lambda p, x: F.linear(x, p["a"])[:, 3].sum(), {"a": (8, 8)}, (X,), {"a": 0}, "one place is picked"),
    "three heads": (lambda p, x: F.linear(x, p["a"]).view(3, 3, 2).sum(1).pow(2).sum(), {"a": (6, 8)}, (X,), {"a": 0},
                    "cut into 2"),
    "an odd size": (lambda p, x: F.linear(x, p["a"]).sum(), {"a": (9, 8)}, (X,), {"a": 0}, "leave that parameter whole"),
    "a parameter": (lambda p, x: (x @ torch.linalg.qr(p["a"])[0]).sum(), {"a": (8, 8)}, (X,), {"a": 0},
                    "is cut) (at test_rules.py"),
    "whole in place": (lambda p, x: (x * p["g"]).add_(F.linear(x, p["a"])).sum(), {"a": (8, 8), "g": (8,)}, (X,),
                       {"a": 0}, "in place"),
    "groups of channels": (lambda p, x: F.group_norm(F.linear(x, p["a"]), 3).sum(), {"a": (6, 8)}, (X,), {"a": 0}, "group_norm is"),
    "a maximum that learns": (lambda p, x: F.linear(x, p["a"]).amax(-1).sum(), {"a": (8, 8)}, (X,), {"a": 0}, "amax over it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_followed_is_an_error(name: str) -> None:
    function, shapes_, inputs, cuts, words = REFUSALS[name]
    text = refused(function, shapes_, inputs, cuts)
    assert words in text, text
    if name != "an odd size":
        assert "test_rules.py" in text, text


def test_blocks_can_be_given() -> None:
    parameters = {"qkv": reals(48, 8), "o": reals(8, 16)}
    cuts = {"qkv": Cut(0, "tp", (16,), 3), "o": (1, "tp")}
    found = check(fused_by_view, parameters, (X3,), cuts, 2)
    assert found.cuts["qkv"].times == 3


def test_an_enter_that_is_dropped_is_found() -> None:
    def drop(graph: Any) -> None:
        node = next(n for n in graph.nodes if n.target is torch.ops.ws.enter)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    parameters = {n: reals(*shape) for n, shape in (*LINEAR.items(), ("g", (8,)))}
    function = lambda p, x: column_row(p, x * p["g"])  # noqa: E731
    cuts = {"a": (0, "tp"), "b": (1, "tp")}
    check(function, parameters, (X3,), cuts, 2)
    with pytest.raises(AssertionError, match="g: "):
        check(function, parameters, (X3,), cuts, 2, edit=drop)
