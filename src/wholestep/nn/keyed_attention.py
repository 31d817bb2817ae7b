"""Scaled-dot-product attention whose dropout keeps no mask.

In: q, k, v (..., heads, tokens, width), an optional mask. Out: what torch's function gives. Kept: q, k, v, the output, one
number per query and, with dropout, the seed of its mask - on every device; torch's own function keeps the probabilities
and their mask, tokens x tokens per head, where no fused kernel applies (dropout on a CPU, a mask with dropout on CUDA).
Grouped heads (`enable_gqa`) are not expanded.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from wholestep.nn.keyed_dropout import draw_key, keys_are_given
from wholestep.ops.attention import scaled_dot_product_attention as keyed


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    training: bool = True,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, and `training`: without it nothing is dropped."""
    p = dropout_p if training else 0.0
    if keys_are_given():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    seed = draw_key(query.device) if p > 0.0 else None
    return keyed(query, key, value, attn_mask, p, is_causal, scale, enable_gqa, key=seed)
