"""Lines of operators that go by places: gathers and scatters with duplicates, sorts, cumulative sums, chains of integers, pads,
resizing, and complex numbers that come and go.

Every maker takes a Room, adds a line (or a few), and says whether it did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.fuzz.operators import Maker

if TYPE_CHECKING:
    from tests.fuzz.draw import Room


def _is_plain(value: torch.Tensor) -> bool:
    return value.dtype in (torch.float32, torch.float64) and value.numel() > 0 and value.dim() >= 1


def scattered(room: Room) -> bool:
    """Rows that are added, put or reduced by an index that names some of them twice."""
    source = room.source
    name, value = room.pick(_is_plain) or (None, None)
    if value is None:
        return False
    rows = value.shape[0]
    places = [source.randrange(rows) for _ in range(rows)]
    index = f"torch.tensor({places})"
    spread = f"{index}.reshape({[rows] + [1] * (value.dim() - 1)}).expand({list(value.shape)})"
    fewer = f"torch.zeros_like({{0}}).index_add(0, {index}, {{0}})"
    forms = [
        fewer, f"torch.zeros_like({{0}}).scatter_add(0, {spread}, {{0}})", f"{{0}}.index_add(0, {index}, {{0}} * 0.5, alpha=2)",
        f"{{0}}.index_put(({index},), {{0}} * 0.3, accumulate=True)", f"{{0}}[{index}]", f"{{0}}[{index}].square() + {{0}}",
        f"torch.zeros_like({{0}}).scatter_reduce(0, {spread}, {{0}}, 'amax', include_self=False)",
        f"{{0}}.scatter_reduce(0, {spread}, {{0}}, 'mean')", f"{{0}}.index_fill(0, {index}, 0.5)",
        "{0}.masked_scatter({0} > 0, {0}.flatten() * 2)", f"F.embedding({index}, {{0}}.reshape({rows}, -1))",
        f"{{0}}.index_copy(0, torch.tensor([{places[0]}]), {{0}}[:1] * 2)", f"{{0}}.take(torch.tensor({places}))",
        f"{{0}}.scatter(0, {spread}[:1], 0.25)",
        "{0}[{0} > 0].sum() + {0}", "{0}.masked_select({0} < 0.5).square().sum() + {0}",
        f"{{0}} * torch.zeros({rows}).scatter_(0, {index}, 1.0).sum()",
        f"torch.segment_reduce({{0}}.float(), 'sum', lengths=torch.tensor([1, {rows - 1}]))",
        f"{{0}}.scatter_reduce(0, {spread}, {{0}}, 'amin')",
        f"{{0}}.index_reduce(0, {index}, {{0}} * 0.5, 'amax')", f"{{0}}.repeat_interleave({source.choice((1, 2))}, 0)",
        "{0}[{0}.detach().flatten().argmax() % {0}.shape[0]]",
        f"torch.zeros({rows}).index_add_(0, {index}, {{0}}.reshape({rows}, -1).sum(1).float())",
    ]  # fmt: skip
    return room.add(source.choice(forms), name)


def ordered(room: Room) -> bool:
    """Sorts, the largest ones, and sums that run along a dimension."""
    source = room.source
    name, value = room.pick(_is_plain) or (None, None)
    if value is None:
        return False
    d = source.randrange(value.dim())
    size = value.shape[d]
    most = source.randint(1, size)
    forms = [
        f"{{0}}.cumsum({d})", f"{{0}}.sigmoid().cumprod({d})", f"{{0}}.logcumsumexp({d})", f"{{0}}.cummax({d})[0]",
        f"{{0}}.topk({most}, {d}, largest={source.random() < 0.5})[0]", f"{{0}}.sort({d}, descending=True, stable=True)[0]",
        f"{{0}}.kthvalue({most}, {d})[0]", f"{{0}}.median({d})[0]", f"{{0}}.diff(dim={d}, prepend={{0}}.narrow({d}, 0, 1))",
        f"{{0}}.flip({d}).cumsum({d}).flip({d})", f"{{0}}.amin({d}, keepdim=True) + {{0}}",
        f"{{0}}.take_along_dim({{0}}.argsort({d}).flip({d}), {d})",
    ]  # fmt: skip
    return room.add(source.choice(forms), name)


def counted(room: Room) -> bool:
    """Integers and booleans on the way, and back to numbers with a gradient."""
    source = room.source
    name, value = room.pick(_is_plain) or (None, None)
    if value is None:
        return False
    whole = "({0}.detach() * 3).floor().to(torch.int64)"
    forms = [
        f"{{0}} * ({whole} % 3)", f"{{0}} * ({whole} // 2).clamp(-2, 2)", f"{{0}} * ({whole} & 3 ^ 1)",
        "{0} * (~({0} > 0)).logical_or({0} < -1)", f"{{0}} + {whole}.to(torch.int32).cumsum(-1) * 0.1",
        f"{{0}}.unsqueeze(-1) * F.one_hot({whole}.clamp(0, 2), 3)", f"torch.where(({whole} % 2).bool(), {{0}}, -{{0}})",
        "{0} * torch.bucketize({0}.detach(), torch.tensor([-0.5, 0.0, 0.7]))", "{0} * {0}.gt(0).any(-1, keepdim=True)",
        "{0} / (({0} > 0).sum().clamp(min=1))", f"{{0}} * {whole}.remainder(4).bitwise_xor(1).to(torch.uint8)",
    ]  # fmt: skip
    return room.add(source.choice(forms), name)


def resized(room: Room) -> bool:
    """Padded in all modes, and resized."""
    source = room.source
    name, value = room.pick(lambda v: _is_plain(v) and v.dim() in (3, 4) and v.dtype == torch.float32) or (None, None)
    if value is None:
        return False
    spatial = value.dim() - 2
    mode = source.choice(("reflect", "replicate", "circular", "constant"))
    pads = [source.choice((0, 1, 1, 2)) for _ in range(2 * spatial)]
    size = [source.choice((1, 2, 3, 5)) for _ in range(spatial)]
    smooth = "bilinear" if spatial == 2 else "linear"
    forms = [
        f"F.pad({{0}}, {pads}, mode={mode!r})", f"F.pad({{0}}, {pads}, mode={mode!r})", "F.pad({0}, (-1, 1), value=0.5)",
        f"F.interpolate({{0}}, size={size})", f"F.interpolate({{0}}, size={size}, mode={smooth!r}, align_corners=True)",
        f"F.interpolate({{0}}, scale_factor=1.6, mode={smooth!r})", f"F.interpolate({{0}}, size={size}, mode='area')",
        f"F.adaptive_avg_pool{spatial}d({{0}}, {size})", f"F.adaptive_max_pool{spatial}d({{0}}, {size})",
    ]  # fmt: skip
    if spatial == 2:
        forms += ["F.unfold({0}, 2, padding=1)", f"F.interpolate({{0}}, size={size}, mode='bicubic')"]
    return room.add(source.choice(forms), name)


def turned_complex(room: Room) -> bool:
    """Through complex numbers and back, in one line."""
    name, value = room.pick(lambda v: v.dtype == torch.float32 and v.numel() and v.dim() >= 1) or (None, None)
    if value is None:
        return False
    last = value.shape[-1]
    forms = [
        f"torch.fft.irfft(torch.fft.rfft({{0}}), n={last})", "torch.fft.fft({0}).real", "torch.fft.rfft({0}).abs()",
        "torch.fft.fft2({0}).abs()" if value.dim() > 1 else "torch.fft.fft({0}).imag", "torch.fft.ifft({0} + 1j * {0}).real",
        "torch.stft({0}.flatten(), 4, hop_length=2, window=torch.ones(4), return_complex=True).abs()",
        "torch.view_as_real(torch.complex({0}, {0} * 0.5).conj().resolve_conj()).sum(-1)",
        "(torch.polar({0}.abs() + 0.1, {0}) * 1).conj().imag",
    ]  # fmt: skip
    if room.source.random() < 0.15:
        weight = room.add_member(f"nn.Parameter(torch.randn({last}, dtype=torch.complex64))", "p")
        return room.add(f"torch.view_as_real(torch.fft.fft({{0}}) * {weight}).sum(-1)", name)
    return room.add(room.source.choice(forms), name)


def shared_by_views(room: Room) -> bool:
    """Writes into one view of a value that other views read before and after."""
    source = room.source
    name, value = room.pick(lambda v: _is_plain(v) and v.dim() >= 2) or (None, None)
    if value is None or not room.add("{0}.clone()", name):
        return False
    base = room.lines[-1].results[0]
    if not room.add(source.choice(("{0}.transpose(0, -1)", "{0}.view(-1)", "{0}[..., ::2]", "{0}[:1]")), base):
        return False
    view = room.lines[-1].results[0]
    if not room.add("{0}.clone()", view):  # what it was before the write
        return False
    write = source.choice(("{0}.mul_(0.5)", "{0}[:1].add_(1)", "{0}.select(0, 0).tanh_()", "{0}.clamp_(-0.5, 0.5)"))
    if not room.add(write, source.choice((base, view)), results=0):
        return False
    return room.add("{0} + {1}.sum()", base, view)


TABLE: dict[Maker, float] = {
    scattered: 1.8, ordered: 1.4, counted: 1.2, resized: 1.5, turned_complex: 0.5, shared_by_views: 0.7,
}  # fmt: skip
"""How likely each is, beside those of `operators.py`."""
