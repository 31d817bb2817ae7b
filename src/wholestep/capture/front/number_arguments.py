"""Functions of torch's that take Python numbers only, composed of operators that take tensors, for numbers that vary.

In: a call that Dynamo meets in which such a number (an annealed `delta`, `label_smoothing`, `margin`, `scale`) is an input of its
graph. Out: a function of ours that it follows, so that one graph serves every number. What is given in another way than here stays
as it is, and is then captured anew for every number. What eager refuses (`delta=0`) raises here too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _require(holds: bool, message: str, kind: type[Exception] = RuntimeError) -> None:
    if not holds:
        raise kind(message)


def _huber_loss(input: Tensor, target: Tensor, reduction: str = "mean", delta: Any = 1.0) -> Tensor:
    _require(delta > 0, "huber_loss does not support non-positive values for delta.")
    away = (input - target).abs()
    return _reduced(torch.where(away < delta, 0.5 * away * away, delta * (away - 0.5 * delta)), reduction)


def _smooth_l1_loss(input: Tensor, target: Tensor, *, reduction: str = "mean", beta: Any = 1.0) -> Tensor:
    _require(beta >= 0, "smooth_l1_loss does not support negative values for beta.")
    away = (input - target).abs()
    divisor = max(beta, 1e-30)  # of what is not selected where beta is 0, and would have a gradient that is NaN
    return _reduced(torch.where(away < beta, 0.5 * away * away / divisor, away - 0.5 * beta), reduction)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: Any = 0.0,
) -> Tensor:  # fmt: skip
    _require(label_smoothing <= 1, "label_smoothing must be between 0.0 and 1.0.")
    label_smoothing = max(label_smoothing, 0.0)  # eager looks only at one that is positive
    dim = 0 if input.dim() == 1 else 1
    if target.is_floating_point():
        smoothed = target * (1 - label_smoothing) + label_smoothing / input.shape[dim]
        return F.cross_entropy(input, smoothed, weight, reduction=reduction)
    ignored = target == ignore_index
    weights = torch.ones_like(input.select(dim, 0)) if weight is None else weight[target.masked_fill(ignored, 0)]
    every = F.log_softmax(input, dim).movedim(dim, -1)
    even = -(every if weight is None else every * weight).sum(-1).masked_fill(ignored, 0.0) / input.shape[dim]
    even = even.sum() / weights.masked_fill(ignored, 0.0).sum() if reduction == "mean" else _reduced(even, reduction)
    named = F.cross_entropy(input, target, weight, ignore_index=ignore_index, reduction=reduction)
    return named * (1 - label_smoothing) + even * label_smoothing


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: Any = 1e-5
) -> Tensor:  # fmt: skip
    wide = input.to(torch.promote_types(input.dtype, torch.float32))  # as torch's kernel computes
    variance, mean = torch.var_mean(wide, [-1 - i for i in range(len(normalized_shape))], correction=0, keepdim=True)
    normal = (wide - mean) * torch.rsqrt(variance + eps)
    normal = normal if weight is None else normal * weight
    return (normal if bias is None else normal + bias).to(input.dtype)


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: Any = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if not training or running_mean is None or running_var is None:  # a momentum that nothing takes
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps)
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    out = F.batch_norm(input, mean, var, weight, bias, True, 1.0, eps)  # those of this batch
    running_mean.mul_(1 - momentum).add_(mean * momentum)
    running_var.mul_(1 - momentum).add_(var * momentum)
    return out


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    scaled = query * (scale * math.sqrt(query.shape[-1]))
    return F.scaled_dot_product_attention(
        scaled, key, value, attn_mask, dropout_p, is_causal, **({"enable_gqa": True} if enable_gqa else {})
    )


def _margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: Any = 0.0, *, reduction: str = "mean"
) -> Tensor:
    return _reduced((-target * (input1 - input2) + margin).clamp_min(0), reduction)


def _triplet_margin_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: Any = 1.0, p: float = 2, eps: float = 1e-6, swap: bool = False, *,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    _require(margin > 0, "margin must be greater than 0.", ValueError)
    near, far = (F.pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp_min(0), reduction)


def _cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: Any = 0.0, *, reduction: str = "mean"
) -> Tensor:
    squares = ((input1 * input1).sum(-1) + 1e-12) * ((input2 * input2).sum(-1) + 1e-12)
    cosine = (input1 * input2).sum(-1) / squares.sqrt()
    apart = torch.where(target == -1, (cosine - margin).clamp_min(0), 0)
    return _reduced(torch.where(target == 1, 1 - cosine, apart), reduction)


def _hinge_embedding_loss(input: Tensor, target: Tensor, margin: Any = 1.0, *, reduction: str = "mean") -> Tensor:
    far, near = torch.where(target != 1, (margin - input).clamp_min(0), 0), torch.where(target != -1, input, 0)
    return _reduced(far + near, reduction)


def _hardtanh(input: Tensor, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Tensor:
    _require(min_val <= max_val, "min_val cannot be greater than max_val", ValueError)
    return input.clamp_(min_val, max_val) if inplace else input.clamp(min_val, max_val)


def _softshrink(input: Tensor, lambd: Any = 0.5) -> Tensor:
    _require(lambd >= 0, "lambda must be greater or equal to 0")
    return input - input.clamp(-lambd, lambd)


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return torch.tensor(data, dtype=dtype, device=device)


def _var(input: Tensor, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
    plain = input.var(dim, correction=0, keepdim=keepdim)
    count = input.numel() // plain.numel()
    return plain * count / torch.full((), count - correction).clamp_min(0).to(plain.dtype)


def _std(input: Tensor, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
    return _var(input, dim, correction=correction, keepdim=keepdim).sqrt()


COMPOSED: dict[Any, Callable[..., Tensor]] = {
    F.huber_loss: _huber_loss, F.smooth_l1_loss: _smooth_l1_loss, F.cross_entropy: _cross_entropy, F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention, F.margin_ranking_loss: _margin_ranking_loss, F.hardtanh: _hardtanh,
    F.triplet_margin_loss: _triplet_margin_loss, F.hinge_embedding_loss: _hinge_embedding_loss,
    F.batch_norm: _batch_norm, F.cosine_embedding_loss: _cosine_embedding_loss, F.softshrink: _softshrink,
    torch.var: _var, torch.std: _std, torch.as_tensor: _as_tensor,
}  # fmt: skip
"""Function -> what takes its place where one of its numbers varies."""
_NUMBERS = {
    "delta", "beta", "label_smoothing", "eps", "scale", "margin", "min_val", "max_val", "correction", "momentum", "lambd", "data",
}  # fmt: skip
_AS_UNDER_AUTOCAST = (F.scaled_dot_product_attention, F.batch_norm, torch.as_tensor)
"""Whose types autocast leaves alone, or gives to what ours is made of as well."""


_REFUSED: dict[Any, tuple[str, Callable[[float], bool]]] = {
    F.huber_loss: ("delta", lambda value: value <= 0), F.smooth_l1_loss: ("beta", lambda value: value < 0),
    F.cross_entropy: ("label_smoothing", lambda value: value > 1), F.softshrink: ("lambd", lambda value: value < 0),
}  # fmt: skip
"""Function -> numbers that its operator refuses and that the decomposition, of which compiled code is made, computes with."""


def composed(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    varies: Callable[[Any], bool],
    constant: Callable[[Any], Any],
) -> Any:
    """What takes the place of a call of a function, or None; `varies`: whether an argument is a number that does, `constant`: the
    number that it is."""
    ours = COMPOSED.get(function)
    if ours is None or (_has_autocast() and function not in _AS_UNDER_AUTOCAST):
        return None  # autocast has types of its own for losses, which differ between devices
    try:
        given = inspect.signature(ours).bind(*args, **kwargs).arguments
    except TypeError:  # with an argument that is not known here, such as `reduce`
        return None
    if any(varies(value) for name, value in given.items() if name in _NUMBERS):
        return ours
    number, refused = _REFUSED.get(function, ("", bool))
    value = constant(given[number]) if number in given else None
    return ours if isinstance(value, int | float) and refused(value) else None


def _has_autocast() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
