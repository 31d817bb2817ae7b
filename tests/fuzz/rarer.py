"""Lines of what fewer models do: writes through all kinds of views, dimensions that come and go in place, many tensors written at
once, indices on several dimensions, rarer mathematics and moves, derivatives taken inside of the loss.

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


def _copy(room: Room) -> tuple[str, torch.Tensor] | None:
    """A fresh value to write to; half of the time one that nothing is differentiated through."""
    found = room.pick(_is_plain)
    forms = ("{0}.clone()", "{0}.detach().clone()")
    if found is None or not room.add(room.source.choice(forms), found[0]):
        return None
    name = room.lines[-1].results[0]
    return name, room.values[name]


VIEWS = (
    "{0}.expand_as({0})", "{0}[None].expand(1, *{0}.shape)", "{0}.unsqueeze(-1).expand(*{0}.shape, 1)", "{0}.unfold(-1, 1, 1)",
    "{0}.unfold(0, {0}.shape[0], {0}.shape[0])", "{0}.movedim(0, -1)", "{0}.view_as({0})", "{0}.narrow(-1, 0, 1)", "{0}[-1:]",
    "{0}[..., ::2]", "{0}[:, None]", "{0}.flatten()", "{0}.unflatten(0, (1, -1))", "{0}.squeeze()", "{0}.select(-1, -1)",
    "{0}.mT", "{0}.diagonal(dim1=0, dim2=-1)", "{0}.diagonal(1, 0, -1)", "{0}.as_strided({0}.shape, {0}.stride())",
    "{0}.swapdims(0, -1)",
    "{0}.permute(*range({0}.dim() - 1, -1, -1))", "{0}.tensor_split(2, 0)[0]", "{0}.T[:1]",
)  # fmt: skip
WRITES = (
    "{0}.fill_(0.25)", "{0}.masked_fill_({0} > 0, -0.5)", "{0}.mul_(0.5).add_(0.1)", "{0}.copy_(torch.full_like({0}, 0.3))",
    "{0}.index_fill_(0, torch.tensor([0]), 0.7)",
    "{0}.index_add_(0, torch.tensor([0, 0]), torch.ones_like({0})[:1].repeat_interleave(2, 0))",
    "{0}.index_copy_(0, torch.tensor([0]), {0}[-1:].clone())", "{0}.scatter_(0, torch.zeros_like({0}, dtype=torch.int64)[:1], 0.4)",
    "{0}.clamp_(min=-0.2)", "{0}.lerp_(torch.ones_like({0}), 0.3)", "{0}.addcmul_({0}.clone(), {0}.clone(), value=0.1)",
    "{0}.div_(3)", "{0}.sub_(0.5)", "{0}.neg_()", "{0}.abs_()", "{0}.sigmoid_()", "{0}.nan_to_num_(0.1)", "{0}.cumsum_(-1)",
    "{0}.masked_scatter_({0} > 0, {0}.flatten() * 2)", "{0}.tril_()", "{0}.fill_diagonal_(0.5)", "{0}.floor_()",
    "{0}.copy_({0}.flip(0))",
    "{0}.put_(torch.tensor([0]), torch.tensor([0.6], dtype={0}.dtype))",
    "{0}.index_put_((torch.tensor([0, 0]),), {0}[0] * 0.1, accumulate=True)",
)  # fmt: skip
STATEMENTS = (
    "{0}[0], {0}[-1] = {0}[-1].clone(), {0}[0].clone()", "{0}[..., :1] += {0}[..., -1:].detach()", "{0}[{0} < 0] *= 0.5",
    "{0}[:] = 0.2",
    "{0}[[0, -1]] = {0}[[-1, 0]]", "{0}[torch.arange({0}.shape[0]), 0] = 0.5", "{0}[..., None][0] = 0.1", "{0} *= {0}.detach() > 0",
)  # fmt: skip


def written_through(room: Room) -> bool:
    """A write through one view or two; the whole is read before and after it."""
    source = room.source
    base, _ = _copy(room) or (None, None)
    if base is None or not room.add("{0} * 2", base):
        return False
    before, view = room.lines[-1].results[0], base
    for _ in range(source.choice((1, 1, 2))):
        if room.add(source.choice(VIEWS), view):
            view = room.lines[-1].results[0]
    if view == base:
        return False
    form = source.choice(STATEMENTS if source.random() < 0.25 else WRITES)
    if not room.add(form, view, results=0):
        return False
    return room.add("{0} + {1}.clamp(-3, 3)", before, base) and room.add("{0} + {1}.clamp(-1, 1).sum()", before, view)


FROM_ANOTHER = (
    "{0}.add_({1})", "{0}.mul_({1})", "{0}.copy_({1})", "{0}.sub_({1}, alpha=2)", "{0}.div_({1}.abs() + 1)",
    "{0}.lerp_({1}.to({0}.dtype), 0.3)",
    "{0}.masked_fill_({1} > 0, 0.5)", "{0}.addcmul_({1}, {1}.detach(), value=0.1)", "{0}.clamp_(max={1})",
    "{0}.index_add_(-1, torch.tensor([0]), {1}[..., :1].expand_as({0}[..., :1]), alpha=0.5)", "{0} += {1}", "{0} *= {1} > 0",
    "{0}[:] = {1}", "{0}[..., 0] = {1}.sum()", "{0}[{0} > {1}] = 0.1", "F.relu({0}, inplace=True)",
    "F.dropout({0}, 0.4, inplace=True)",
    "{0}.data.add_({1}.detach())", "F.leaky_relu_({0}, 0.2)", "F.threshold_({0}, 0.1, 0.2)", "{0}.detach_().mul_(2)",
)  # fmt: skip


def written_from(room: Room) -> bool:
    """In place, from a value of another shape or dtype."""
    copy, value = _copy(room) or (None, None)
    other = None if value is None else room.pick(lambda v: v.dtype != torch.bool and _widens_to(v, value))
    if copy is None or other is None:
        return False
    return room.add(room.source.choice(FROM_ANOTHER), copy, other[0], results=0)


def _widens_to(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() <= b.dim() and all(x in (1, y) for x, y in zip(reversed(a.shape), reversed(b.shape)))


def turned_in_place(room: Room) -> bool:
    """Dimensions that come, go and change places in place."""
    name, value = _copy(room) or (None, None)
    if value is None:
        return False
    forms = [
        "{0}.unsqueeze_(0)",
        "{0}.unsqueeze_(-1)",
        "{0}.squeeze_()",
        "{0}.squeeze_(0)",
        "{0}.transpose_(0, -1)",
        "{0}.swapaxes_(-1, 0)",
    ]
    if value.dim() == 2:
        forms.append("{0}.t_()")
    return room.add(room.source.choice(forms), name) and room.add("{0}.mul_(0.5)", room.lines[-1].results[0])


def many_at_once(room: Room) -> bool:
    """Buffers written by one call, or by `out=`."""
    source = room.source
    name, value = room.pick(lambda v: v.dtype == torch.float32 and v.numel() and v.dim() <= 3) or (None, None)
    if value is None:
        return False
    first, second = (room.add_member(f"nn.Buffer(torch.randn({list(value.shape)}))", "b") for _ in range(2))
    forms = (
        f"torch._foreach_mul_([{first}, {second}], 0.9)",
        f"torch._foreach_add_([{first}, {second}], [{{0}}.detach()] * 2, alpha=0.1)",
        f"torch._foreach_lerp_([{first}, {second}], [{{0}}.detach(), {{0}}.detach() * 2], 0.2)",
        f"torch._foreach_copy_([{first}, {second}], [{second} * 0.5, {{0}}.detach()])",
        f"torch.mul({first}, 0.9, out={first})", f"torch.add({first}, {{0}}.detach(), out={second})",
        f"{first}.data = {first}.data * 0.5", f"{first}.data.copy_({{0}}.detach())", f"{first}[:] = {second}",
        f"{first}.view(-1)[:1] = 0.5", f"{first}.roll(1, 0), {first}.copy_({first}.roll(1, 0))",
    )  # fmt: skip
    before = source.random() < 0.5 and room.add(source.choice(forms), name, results=0)
    if not room.add(f"{{0}} + {first} * 0.1 - {second} * 0.2", name):
        return False
    return before or room.add(source.choice(forms), name, results=0)


def picked(room: Room) -> bool:
    """Indices on several dimensions, in lists, with masks and slices between them; read, or written."""
    source = room.source
    name, value = room.pick(lambda v: _is_plain(v) and v.dim() >= 2) or (None, None)
    if value is None:
        return False
    a, b = ([source.randrange(-size, size) for _ in range(2)] for size in (value.shape[0], value.shape[1]))
    places = [
        f"{a}, {b}", f"[[{a[0]}], [{a[1]}]], {b}", f":, {b}", f"{a}, ..., 0",
        f"..., {a[:1]}, None" if value.shape[-1] == value.shape[0] else "...",
        f"torch.tensor({a}), :1", f"{{0}}[:, 0] > 0, {b[0]}", f"None, {a}", f"{a[0]}, {b}", f"::2, {b}",
        f"torch.tensor({a}), None, {b}",
        f"torch.tensor({a[0]}), {b[0]}:", "{0} > 0.3", "torch.tensor([], dtype=torch.int64)",
        f"{a}, :, [0, 0]" if value.dim() > 2 else "-1",
        f"..., torch.arange({value.shape[-1]}).flip(0)", f"torch.ones({value.shape[0]}, dtype=torch.bool)",
    ]  # fmt: skip
    place = source.choice(places)
    if source.random() < 0.6:
        return room.add(f"{{0}}[{place}]", name) and room.add("{0}.sum()", room.lines[-1].results[0])
    if not room.add("{0}.clone()", name):
        return False
    return room.add(f"{{0}}[{place}] {source.choice(('=', '+=', '*='))} 0.5", room.lines[-1].results[0], results=0)


COMPUTED = (
    "torch.special.erf({0})", "torch.log1p({0}.abs())", "torch.expm1({0} * 0.1)", "torch.special.xlogy({0}.abs(), {0}.abs() + 0.1)",
    "torch.hypot({0}, {0} + 1)", "torch.logaddexp({0}, {0} * 2)", "torch.copysign({0}, {0} - 0.5)", "torch.lgamma({0}.abs() + 1)",
    "torch.digamma({0}.abs() + 1)", "{0}.clamp({0}.detach() - 0.1, {0}.detach().abs())", "torch.fmod({0}, 0.7)", "{0} % 0.7",
    "{0} // 0.7 + {0}",
    "{0} ** 3", "2.0 ** {0}.clamp(-3, 3)", "{0}.abs().pow(0.5 + {0}.abs())", "torch.where({0} > 0, {0}, 0.1)",
    "torch.where({0} > 0, 1.0, {0})",
    "{0}.std(-1, unbiased=False)", "torch.var_mean({0}, -1, correction=0)[0]", "torch.std_mean({0} + 0.1, 0, correction=0)[1]",
    "{0}.quantile(0.4, -1)", "{0}.nanmean(-1)", "{0}.nansum(0)", "{0}.prod(-1)", "{0}.prod()", "torch.cummin({0}, 0)[0]",
    "{0}.aminmax(dim=-1)[1]",
    "torch.linalg.vecdot({0}, {0} + 1)", "torch.outer({0}.flatten()[:4], {0}.flatten()[-3:])", "torch.kron({0}, torch.ones(2))",
    "torch.tensordot({0}, {0}, ([-1], [-1]))", "torch.einsum('...i,...j,...i->...j', {0}, {0}, {0})",
    "{0}.renorm(2, 0, 0.5)", "torch.cov({0}[:3])",
    "torch.baddbmm({0}, {0}, {0}.mT @ {0})", "torch.heaviside({0}.detach(), {0})",
    "torch.sinc({0})", "{0}.cosh()", "{0}.atanh().nan_to_num(0.3)", "{0}.rsqrt().nan_to_num(0.2)",
    "torch.searchsorted({0}.detach().flatten().sort()[0], {0}.detach()) * {0}",
    "F.normalize({0} + 0.3, p=1.0, dim=0)", "F.cosine_similarity({0}, {0}.flip(0), dim=-1, eps=1e-3)",
    "F.glu(torch.cat([{0}, {0}], -1), -1)",
    "F.prelu({0}, torch.tensor([0.3], dtype={0}.dtype))", "torch.trapezoid({0}, dim=-1)", "F.softmax({0}, -1, dtype=torch.float64)",
    "F.gumbel_softmax({0}.detach(), 0.5, True) * {0}", "torch.logcumsumexp({0}, 0)", "torch.mode({0}, -1)[0]",
    "{0}.round(decimals=1) + {0}",
    "torch.linalg.cross({0}[..., :3], {0}[..., -3:] + 1)", "torch.addmv({0}[0], {0}.mT, {0}[:, 0])", "{0}.frexp()[0]",
    "{0}.bool() * {0}",
)  # fmt: skip
MOVED = (
    "torch.rot90({0})", "{0}.tile(2)", "{0}.repeat(2, *[1] * {0}.dim())", "{0}.unflatten(-1, (1, -1))",
    "torch.hstack([{0}, {0}])", "torch.dstack([{0}, {0}])",
    "torch.vstack([{0}, {0}])", "torch.broadcast_tensors({0}, {0}[:1])[1]", "torch.select_scatter({0}, {0}[0] * 2, 0, -1)",
    "torch.block_diag({0}, {0})",
    "torch.slice_scatter({0}, {0}[:1] * 3, 0, 0, 1)", "torch.diagonal_scatter({0}, {0}.diagonal() + 1)",
    "torch.diag_embed({0}, 1)", "torch.diag({0})",
    "torch.meshgrid({0}.flatten()[:3], {0}.flatten()[:2], indexing='ij')[0]",
    "torch.cartesian_prod({0}.flatten()[:3], {0}.flatten()[:2])",
    "{0}[torch.triu_indices({0}.shape[0], {0}.shape[0])[0]]", "{0}.T.reshape({0}.shape)",
    "{0}.view(torch.int32).view(torch.float32)", "{0}.ravel()",
    "{0}.new_zeros({0}.shape).copy_({0})", "torch.empty_like({0}).copy_({0})", "{0}.nonzero().float().sum() + {0}",
    "{0}.argwhere().shape[0] * {0}",
    "{0}.unique().sum() + {0}", "torch.as_strided_scatter({0}, {0}.flatten()[:1], (1,), (1,))",
    "{0}.to(torch.float64, copy=True).float()", "{0}.msort()",
    "F.pad({0}, (1, 1))[..., 1:-1]", "{0}.cpu().to({0}.device)", "{0}.type_as({0}.double())", "{0}.split(1, -1)[-1]",
    "sum({0}.unbind(0))", "torch.stack(list({0}))",
)  # fmt: skip


def computed(room: Room) -> bool:
    name, _ = room.pick(_is_plain) or (None, None)
    return name is not None and room.add(room.source.choice(COMPUTED), name)


def moved(room: Room) -> bool:
    name, _ = room.pick(_is_plain) or (None, None)
    return name is not None and room.add(room.source.choice(MOVED), name)


def differentiated(room: Room) -> bool:
    """Functions of functions, and gradients inside of the loss that are trained themselves."""
    name, _ = room.pick(lambda v: _is_plain(v) and v.requires_grad) or (None, None)
    if name is None:
        return False
    forms = (
        "torch.vmap(lambda row: row.sin() * row.sum())({0})", "torch.vmap(torch.cumsum, (0, None))({0}[:, None], 0)",
        "torch.func.grad(lambda x: x.square().sum() * x.mean())({0})",
        "torch.autograd.grad({0}.tanh().sum(), {0}, create_graph=True)[0]",
        "torch.func.jvp(torch.sin, ({0},), ({0} * 2,))[1]", "torch.func.vmap(torch.func.grad(lambda row: row.pow(3).sum()))({0})",
    )  # fmt: skip
    return room.add(room.source.choice(forms), name)


TABLE: dict[Maker, float] = {
    written_through: 1.6, written_from: 1.2,
    turned_in_place: 0.5, many_at_once: 0.7, picked: 1.2, computed: 1.6, moved: 1.4, differentiated: 0.3,
}  # fmt: skip
"""How likely each is, beside those of `operators.py`."""
