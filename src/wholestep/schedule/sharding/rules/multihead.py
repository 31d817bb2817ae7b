"""nn.MultiheadAttention, written out: its one call becomes projections, attention and the layer behind it, each by its own rule.

Shapes: L queries, S keys, N rows, E width, H heads; q, k, v are (L, N, E) as the function takes them.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F

from wholestep.schedule.sharding.layout import WHOLE
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.values import Called, Value

_NAMES = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
_ABSENT = ("bias_k", "bias_v", "add_zero_attn", "use_separate_proj_weight", "static_k", "static_v")


@rule("multi_head_attention_forward")
def multi_head_attention(p: Program, call: Called) -> Any:
    given = dict(zip(_NAMES, call.args)) | call.kwargs
    query, heads = given["query"], given["num_heads"]
    absent = not any(isinstance(given.get(name), Value) or given.get(name) for name in _ABSENT)
    if query.dim != 3 or not absent or call.varies:
        p.refuse_cut(call.name, next(value for value in call.values if not value.is_whole))
    q, k, v = (_by_heads(p, one, heads) for one in _projected(p, given))
    mask = _mask(p, given, q)
    drop = given["dropout_p"] if given.get("training", True) else 0.0
    weights: Value | None = None
    if given.get("need_weights", True):
        scores = p.call(
            torch.matmul, p.call(torch.mul, q, 1 / math.sqrt(q.shape[-1])), p.call(torch.transpose, k, -1, -2)
        )
        scores = scores if mask is None else p.call(torch.add, scores, mask)
        weights = p.call(torch.softmax, scores, -1)
        weights = weights if drop == 0 else p.call(F.dropout, weights, drop)
        out = p.call(torch.matmul, weights, v)
    else:
        out = p.call(F.scaled_dot_product_attention, q, k, v, attn_mask=mask, dropout_p=drop)
    joined = p.call(torch.flatten, p.call(torch.permute, out, (2, 0, 1, 3)), 2)
    found = p.call(F.linear, joined, given["out_proj_weight"], given["out_proj_bias"])
    if weights is not None and given.get("average_attn_weights", True):
        weights = p.reduced(p.call(torch.mean, weights, 1))
    return found, weights


def _projected(p: Program, given: dict[str, Any]) -> list[Value]:
    inputs = [given[name] for name in ("query", "key", "value")]
    weight, bias, width = given["in_proj_weight"], given["in_proj_bias"], inputs[0].shape[-1]
    if inputs[0] is inputs[1] is inputs[2]:
        return list(p.call(torch.split, p.call(F.linear, inputs[0], weight, bias), width, 2))
    weights = p.call(torch.split, weight, width, 0)
    biases = [None] * 3 if bias is None else p.call(torch.split, bias, width, 0)
    return [p.call(F.linear, x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def _by_heads(p: Program, x: Value, heads: int) -> Value:
    """(L, N, E) -> (N, H, L, width)."""
    return p.call(torch.permute, p.call(torch.unflatten, x, 2, (heads, x.shape[2] // heads)), (1, 2, 0, 3))


def _mask(p: Program, given: dict[str, Any], like: Value) -> Value | None:
    """Numbers to add, of both masks; True hides a key."""
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if mask is not None:
        mask = _numbers(p, mask, like)
        if mask.dim == 3:
            mask = p.call(torch.unflatten, mask, 0, (-1, like.shape[1]))
    if padding is not None:
        row = p.call(torch.unsqueeze, p.call(torch.unsqueeze, _numbers(p, padding, like), 1), 1)
        mask = row if mask is None else p.call(torch.add, mask, row)
    return mask


def _numbers(p: Program, mask: Value, like: Value) -> Value:
    if mask.example.dtype != torch.bool:
        return mask
    zeros = p.emit(torch.zeros_like, mask, layout=WHOLE, dtype=like.example.dtype)
    return p.emit("masked_fill", zeros, mask, float("-inf"), layout=WHOLE)
