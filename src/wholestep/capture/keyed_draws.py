"""Random operators drawn from the step's keys: from uniform or normal numbers by arithmetic, or by a generator that a key seeds.

In: the sites of a run, and the arguments of an operator. Out: what the operator would draw, as a function of the next key, so
that it is the same in a captured step, in the eager reference, and when it is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from wholestep.capture.sites import Sites
from wholestep.ops.wide import wide_dtype

aten = torch.ops.aten
ws = torch.ops.ws


def _uniform(sites: Sites, size: Any, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    return ws.uniform(list(size), sites.next_key(device, size), dtype or torch.get_default_dtype())


def _normal(sites: Sites, size: Any, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    return ws.normal(list(size), sites.next_key(device, size), dtype or torch.get_default_dtype())


def _device(kwargs: dict) -> torch.device:
    return torch.device(kwargs.get("device") or "cpu")


def _chance(sites: Sites, like: torch.Tensor, probability: Any) -> torch.Tensor:
    return _uniform(sites, like.shape, like.device, wide_dtype(like.dtype)) < probability


def _chance_by_tensor(sites: Sites, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    if p.device.type == "cpu":  # a GPU's kernel stops the process, and does so without a wait
        sites.assume(((p >= 0) & (p <= 1)).all(), "Expected p_in >= 0 && p_in <= 1 to be true")
    return _chance(sites, x, p)


def _chance_by_number(sites: Sites, x: torch.Tensor, p: Any = 0.5) -> torch.Tensor:
    _require(sites, p >= 0, "bernoulli_ expects p to be in [0, 1]")
    _require(sites, p <= 1, "bernoulli_ expects p to be in [0, 1]")
    return _chance(sites, x, p)


def _uniform_between(sites: Sites, x: torch.Tensor, low: Any = 0.0, high: Any = 1.0) -> torch.Tensor:
    _require(sites, low <= high, "uniform_ expects to return a [from, to) range, but found from > to")
    return _uniform(sites, x.shape, x.device, x.dtype) * (high - low) + low


def _require(sites: Sites, holds: Any, otherwise: str) -> None:
    """Of numbers, some of which vary and are tensors here."""
    if isinstance(holds, torch.Tensor):
        sites.assume(holds, otherwise)
    elif not holds:
        raise RuntimeError(otherwise)


def _randint(sites: Sites, low: int, high: int, size: Any, **kwargs: Any) -> torch.Tensor:
    drawn = _uniform(sites, size, _device(kwargs), torch.float64) * (high - low)
    return (drawn.floor() + low).to(kwargs.get("dtype") or torch.int64)


def _normal_around(sites: Sites, mean: Any, std: Any) -> torch.Tensor:
    if isinstance(std, torch.Tensor):
        sites.assume((std >= 0).all(), "normal expects all elements of std >= 0.0")
    like = mean if isinstance(mean, torch.Tensor) else std
    shape = torch.broadcast_shapes(*(t.shape for t in (mean, std) if isinstance(t, torch.Tensor)))
    return _normal(sites, shape, like.device, like.dtype) * std + mean


def _geometric(sites: Sites, x: torch.Tensor, p: float, **_: Any) -> torch.Tensor:
    drawn = _uniform(sites, x.shape, x.device, torch.float64)
    return x.copy_((torch.log1p(-drawn) / math.log1p(-p)).ceil().clamp(min=1) if p < 1 else torch.ones_like(drawn))


def _multinomial(sites: Sites, weights: torch.Tensor, count: int, replacement: bool = False, **_: Any) -> torch.Tensor:
    """As a race: each category finishes after a time that is exponential with its weight as rate, and the first ones win."""
    valid = (weights.isfinite() & (weights >= 0)).all() & (weights.sum(-1) > 0).all()
    sites.assume(valid, "torch.multinomial: weights must be finite, not negative, and not all zero")
    runs = (count, *weights.shape) if replacement else weights.shape
    dtype = wide_dtype(weights.dtype)
    times = (-torch.log1p(-_uniform(sites, runs, weights.device, dtype))).clamp(min=torch.finfo(dtype).tiny)
    rates = weights.to(dtype) / times
    return rates.argmax(-1).movedim(0, -1).contiguous() if replacement else rates.topk(count).indices


def _native_dropout(sites: Sites, x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = _chance(sites, x, 1 - p)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros_like(x)), keep


def _rrelu(
    sites: Sites, x: torch.Tensor, noise: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    generator: Any = None,
) -> torch.Tensor:  # fmt: skip
    """The slope of every negative element is drawn; torch's backward reads it from `noise`."""
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    drawn = _uniform(sites, x.shape, x.device, wide_dtype(x.dtype)) * (upper - lower) + lower
    noise.copy_(torch.where(x > 0, torch.ones_like(drawn), drawn))
    return x * noise


KEYED: dict[Any, Callable[..., Any]] = {
    aten.rand.default: lambda s, size, **k: _uniform(s, size, _device(k), k.get("dtype")),
    aten.randn.default: lambda s, size, **k: _normal(s, size, _device(k), k.get("dtype")),
    aten.rand_like.default: lambda s, x, **k: _uniform(s, x.shape, x.device, k.get("dtype") or x.dtype),
    aten.randn_like.default: lambda s, x, **k: _normal(s, x.shape, x.device, k.get("dtype") or x.dtype),
    aten.randint.default: lambda s, high, size, **k: _randint(s, 0, high, size, **k),
    aten.randint.low: _randint,
    aten.randint_like.default: lambda s, x, high, **k: _randint(
        s, 0, high, x.shape, device=x.device, dtype=k.get("dtype") or x.dtype
    ),
    aten.randint_like.low_dtype: lambda s, x, low, high, **k: _randint(
        s, low, high, x.shape, device=x.device, dtype=k.get("dtype") or x.dtype
    ),
    aten.randperm.default: lambda s, n, **k: _uniform(s, [n], _device(k), torch.float64).argsort(),
    aten.bernoulli.default: lambda s, x, **k: _chance_by_tensor(s, x, x).to(x.dtype),
    aten.bernoulli.p: lambda s, x, p, **k: _chance_by_number(s, x, p).to(x.dtype),
    aten.bernoulli_.float: lambda s, x, p=0.5, **k: x.copy_(_chance_by_number(s, x, p)),
    aten.bernoulli_.Tensor: lambda s, x, p, **k: x.copy_(_chance_by_tensor(s, x, p)),
    aten.uniform_.default: lambda s, x, low=0.0, high=1.0, **k: x.copy_(_uniform_between(s, x, low, high)),
    aten.normal_.default: lambda s, x, mean=0.0, std=1.0, **k: x.copy_(
        _normal(s, x.shape, x.device, x.dtype) * std + mean
    ),
    aten.exponential_.default: lambda s, x, rate=1.0, **k: x.copy_(
        -torch.log1p(-_uniform(s, x.shape, x.device, x.dtype)) / rate
    ),
    aten.cauchy_.default: lambda s, x, median=0.0, sigma=1.0, **k: x.copy_(
        median + sigma * torch.tan(math.pi * (_uniform(s, x.shape, x.device, x.dtype) - 0.5))
    ),
    aten.log_normal_.default: lambda s, x, mean=1.0, std=2.0, **k: x.copy_(
        (_normal(s, x.shape, x.device, x.dtype) * std + mean).exp()
    ),
    aten.geometric_.default: _geometric,
    aten.normal.Tensor_Tensor: lambda s, mean, std, **k: _normal_around(s, mean, std),
    aten.normal.Tensor_float: lambda s, mean, std=1.0, **k: _normal_around(s, mean, std),
    aten.normal.float_Tensor: lambda s, mean, std, **k: _normal_around(s, mean, std),
    aten.normal.float_float: lambda s, mean, std, size, **k: _normal(s, size, _device(k), k.get("dtype")) * std + mean,
    aten.multinomial.default: _multinomial,
    aten._standard_gamma.default: lambda s, x, **k: ws.draw(x, None, s.next_key(x.device), "gamma"),
    aten._sample_dirichlet.default: lambda s, x, **k: ws.draw(x, None, s.next_key(x.device), "dirichlet"),
    aten.poisson.default: lambda s, x, **k: ws.draw(x, None, s.next_key(x.device), "poisson"),
    aten.binomial.default: lambda s, count, p, **k: ws.draw(count, p, s.next_key(p.device), "binomial"),
    aten.native_dropout.default: _native_dropout,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_.default: lambda s, x, *arguments, **k: x.copy_(_rrelu(s, x, *arguments, **k)),
}
"""Random operator -> the same draw from the next key: called with the sites, then as the operator."""
