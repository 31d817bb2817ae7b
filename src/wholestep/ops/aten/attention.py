"""Attention as one operator: the matrix products only, as torch counts them; softmax, scale and dropout are left out.

D, V: width of keys and of values. Per pair (query, key) and head the forward does 2 D (scores) + 2 V (mixing); the backward
does 2 (2 D + 2 V), and computes the scores again: 2 D executed that are no part of the mathematics.

A causal operator computes half the square: row i of T sees min(i + 1, S) keys, counted as i + 1/2. An explicit mask hides
values and saves nothing: all pairs count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wholestep.ops.amounts import Amount, product, size, smallest
from wholestep.ops.call import Call
from wholestep.ops.record import flops_of, record

SCALED = "aten::_scaled_dot_product_"


def doubled_pairs(queries: Amount, keys: Amount, causal: bool) -> Amount:
    """Twice the pairs (query, key) that are computed, so that half a square stays a whole number."""
    if not causal:
        return 2 * queries * keys
    corner = queries if queries == keys else smallest((queries, keys))
    return corner * corner + 2 * (queries - corner) * keys


def _sizes(call: Call, causal: bool, *, heads_last: bool = False) -> tuple[Amount, Amount, Amount]:
    """(twice the pairs over all rows and heads, D, V)."""
    # `k` before `key`: the key of ws::attention is that of its random numbers.
    q, k, v = call.shape("q", "query"), call.shape("k", "key"), call.shape("v", "value")
    length = -3 if heads_last else -2
    heads = product(q[:-3]) * q[-2] if heads_last else product(q[:-2])
    longest = call.get("max_k") if call.get("cum_seq_q") is not None else None
    longest = call.get("max_seqlen_k") if call.get("cu_seqlens_q") is not None else longest
    if longest is not None:  # packed sequences: their lengths are data, so each counts as the longest
        return heads * q[length] * size(longest) * (1 if causal else 2), q[-1], v[-1]
    return heads * doubled_pairs(q[length], k[length], causal), q[-1], v[-1]


def _forward(sizes: tuple[Amount, Amount, Amount]) -> Amount:
    pairs, d, v = sizes
    return pairs * (d + v)


def _backward(sizes: tuple[Amount, Amount, Amount]) -> tuple[Amount, Amount]:
    pairs, d, v = sizes
    return pairs * (3 * d + 2 * v), pairs * 2 * (d + v)


@flops_of(
    SCALED + "flash_attention", SCALED + "flash_attention_for_cpu", SCALED + "efficient_attention",
    SCALED + "cudnn_attention", SCALED + "fused_attention_overrideable", SCALED + "attention_math",
    "aten::scaled_dot_product_attention",
    kind="attention",
)  # fmt: skip
def attention(call: Call) -> Amount:
    return _forward(_sizes(call, bool(call.get("causal", call.get("is_causal", False)))))


@flops_of(
    SCALED + "flash_attention_backward", SCALED + "flash_attention_for_cpu_backward",
    SCALED + "efficient_attention_backward", SCALED + "cudnn_attention_backward",
    SCALED + "fused_attention_overrideable_backward",
    kind="attention",
)  # fmt: skip
def attention_backward(call: Call) -> tuple[Amount, Amount]:
    return _backward(_sizes(call, bool(call.get("causal", call.get("is_causal", False)))))


# The kernels below hold heads after the length: (rows, length, heads, width).


@flops_of("aten::_flash_attention_forward", "aten::_efficient_attention_forward", kind="attention")
def attention_heads_last(call: Call) -> Amount:
    return _forward(_sizes(call, _is_causal(call), heads_last=True))


@flops_of("aten::_flash_attention_backward", "aten::_efficient_attention_backward", kind="attention")
def attention_heads_last_backward(call: Call) -> tuple[Amount, Amount]:
    return _backward(_sizes(call, _is_causal(call), heads_last=True))


def _is_causal(call: Call) -> bool:
    return bool(call.get("is_causal", False)) or bool(call.get("custom_mask_type", 0))


def drops(arguments: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers: attention's kernels are tagged as random for their dropout."""
    return arguments.get("dropout_p", 0.0) != 0.0


record(
    *(SCALED + name for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
                                 "fused_attention_overrideable", "attention_math")),
    "aten::scaled_dot_product_attention", "aten::_flash_attention_forward", "aten::_efficient_attention_forward",
    *(SCALED + name + "_backward" for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention",
                                               "cudnn_attention", "fused_attention_overrideable")),
    "aten::_flash_attention_backward", "aten::_efficient_attention_backward",
    draws=drops,
)  # fmt: skip
