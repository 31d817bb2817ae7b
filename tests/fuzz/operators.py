"""Lines of tensor operators: views, casts, constants, elementwise operators, products, reductions, writes.

Every maker takes a Room, adds a line (or a few), and says whether it did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.fuzz.draw import Room

Maker = Callable[["Room"], bool]
FLOATS = ("torch.float32", "torch.float64", "torch.bfloat16")


def begin(room: Room) -> None:
    """A few inputs and parameters to start from, of any strides."""
    source = room.source
    for _ in range(source.randint(1, 3)):
        room.add_input(_input(room))
    if source.random() < 0.3:
        room.add_input(f"torch.randint(0, 5, {room.shape(source.randint(1, 3))})")
    for _ in range(source.randint(1, 2)):
        dtype = source.choice(("", "", "", "", "torch.float64", "torch.bfloat16"))
        _read_parameter(room, room.shape(source.randint(1, 4)), dtype)
    if source.random() < 0.6:  # something that broadcasts with what is there
        value = room.pick(_is_float)
        if value is not None:
            _read_parameter(room, [size if source.random() < 0.8 else 1 for size in value[1].shape], "")
            room.add("{0} + {1}", value[0], room.lines[-1].results[0])


def _read_parameter(room: Room, shape: list[int], dtype: str) -> None:
    name = room.parameter(shape, dtype=dtype)
    room.add(f"{name} * {room.source.choice(('1', '1.0', '0.5', '-1'))}")


def _input(room: Room) -> str:
    source = room.source
    shape = room.shape(source.randint(1, 4))
    kind = source.random()
    if kind < 0.1 and len(shape) >= 2:
        return f"torch.randn({shape}).transpose(0, -1)"
    if kind < 0.15 and shape:
        return f"torch.randn({[*shape[:-1], 2 * shape[-1]]})[..., ::2]"
    if kind < 0.2:
        return f"torch.randn({shape}, dtype={source.choice(FLOATS)})"
    if kind < 0.25:
        return f"torch.randn({[1, *shape]}).expand({[2, *shape]})"
    return f"torch.randn({shape})"


def _is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point()


# ---- views ----


def reshape(room: Room) -> bool:
    name, value = room.pick() or (None, None)
    if value is None:
        return False
    shape = factors(room, value.numel())
    method = room.source.choice(("view", "reshape", "reshape"))
    return room.add(f"{{0}}.{method}({shape})", name)


def factors(room: Room, count: int) -> list[int]:
    """A shape of so many elements, ones among them."""
    shape: list[int] = []
    rest = count
    while rest > 1 and len(shape) < 3 and room.source.random() < 0.8:
        divisors = [d for d in range(2, rest + 1) if rest % d == 0]
        shape.append(room.source.choice(divisors))
        rest //= shape[-1]
    shape.append(rest)
    for _ in range(room.source.choice((0, 0, 1, 2))):
        shape.insert(room.source.randint(0, len(shape)), 1)
    return shape


def turn(room: Room) -> bool:
    name, value = room.pick(lambda v: v.dim() >= 2) or (None, None)
    if value is None:
        return False
    source, dims = room.source, value.dim()
    if source.random() < 0.4:
        order = source.sample(range(dims), dims)
        return room.add(f"{{0}}.permute({order})", name)
    a, b = source.randrange(dims), source.randrange(-dims, dims)
    form = source.choice(
        (f"{{0}}.transpose({a}, {b})", f"{{0}}.movedim({a}, {b})", f"{{0}}.swapaxes({a}, {b})", "{0}.mT")
    )
    return room.add(form, name)


def ones_dimension(room: Room) -> bool:
    """unsqueeze, squeeze, expand: where dimensions of size one come and go."""
    source = room.source
    name, value = room.pick(lambda v: v.dim() <= 4) or (None, None)
    if value is None:
        return False
    ones = [d for d, size in enumerate(value.shape) if size == 1]
    choice = source.random()
    if choice < 0.35 or not ones:
        return room.add(f"{{0}}.unsqueeze({source.randint(-value.dim() - 1, value.dim())})", name)
    if choice < 0.6:
        dims = source.choice((str(source.choice(ones)), "", str(tuple(ones))))
        return room.add(f"{{0}}.squeeze({dims})", name)
    shape = [source.choice((1, 2, 3)) if size == 1 else source.choice((size, -1)) for size in value.shape]
    return room.add(f"{{0}}.expand({shape})", name)


def part(room: Room) -> bool:
    """slice, select, narrow, diagonal, unfold."""
    source = room.source
    name, value = room.pick(lambda v: v.dim() >= 1 and v.numel()) or (None, None)
    if value is None:
        return False
    d = source.randrange(value.dim())
    size = value.shape[d]
    start = source.randrange(size)
    length = source.randint(1, size - start)
    before = ":, " * d
    forms = [
        f"{{0}}.select({d}, {start})", f"{{0}}.narrow({d}, {start}, {length})", f"{{0}}[{before}{start}:{start + length}]",
        f"{{0}}[{before}::{source.choice((1, 2, 3))}]", f"{{0}}[{before}:{size}]", "{0}[..., -1]", "{0}[None]",
        f"{{0}}.unfold({d}, {length}, {source.choice((1, 2))})",
    ]  # fmt: skip
    if value.dim() >= 2:
        forms.append("{0}.diagonal(dim1=-2, dim2=-1)")
    return room.add(source.choice(forms), name)


def strided(room: Room) -> bool:
    """as_strided, within what a dense value has."""
    source = room.source
    name, value = room.pick(lambda v: v.is_contiguous() and v.numel() > 0 and v.dim() and v._base is None) or (
        None,
        None,
    )
    if value is None or not room.source.random() < 0.5:
        return False
    rows = source.randint(1, min(4, value.numel()))
    stride = source.randint(0, (value.numel() - 1) // rows + 1)
    columns = source.randint(1, max(1, value.numel() - (rows - 1) * stride))
    return room.add(f"{{0}}.as_strided(({rows}, {min(columns, 5)}), ({stride}, 1))", name)


def pieces(room: Room) -> bool:
    """chunk, split, unbind: several results."""
    source = room.source
    name, value = room.pick(lambda v: v.dim() >= 1 and max(v.shape) > 1) or (None, None)
    if value is None:
        return False
    d = source.choice([d for d, size in enumerate(value.shape) if size > 1])
    size = value.shape[d]
    if size <= 3 and source.random() < 0.4:
        return room.add(f"{{0}}.unbind({d})", name, results=size)
    if source.random() < 0.5:
        first = source.randint(1, size - 1)
        return room.add(f"{{0}}.split([{first}, {size - first}], {d})", name, results=2)
    return room.add(f"{{0}}.chunk(2, {d})", name, results=2)


def joined(room: Room) -> bool:
    source = room.source
    name, value = room.pick(lambda v: v.dim() >= 1) or (None, None)
    if value is None:
        return False
    others = [n for n, v in room.values.items() if v.shape == value.shape]
    chosen = [name, *source.choices(others, k=source.randint(1, 2))]
    d = source.randint(-value.dim(), value.dim() - 1)
    listed = ", ".join(f"{{{i}}}" for i in range(len(chosen)))
    return room.add(f"torch.{source.choice(('cat', 'stack'))}([{listed}], {d})", *chosen)


def copied(room: Room) -> bool:
    name, value = room.pick() or (None, None)
    if value is None:
        return False
    forms = ["{0}.clone()", "{0}.contiguous()", "{0}.detach()", "{0}.flatten()", "{0}.flip(0)" if value.dim() else "{0} * 1",
             "{0}.roll(1)", "{0}.repeat(2, *[1] * ({0}.dim() - 1))" if value.dim() else "{0}.clone()",
             "{0}.clone(memory_format=torch.contiguous_format)"]  # fmt: skip
    return room.add(room.source.choice(forms), name)


# ---- elementwise ----

UNARY = (
    "{0}.tanh()", "{0}.sigmoid()", "-{0}", "{0}.abs()", "{0}.relu()", "F.gelu({0})", "F.silu({0})", "{0}.sin()",
    "{0}.clamp(-1, 1)", "{0}.square()", "({0} * 0.1).exp()", "({0}.abs() + 1).log()", "({0}.abs() + 0.5).sqrt()",
    "{0} * 1", "{0} / 1", "{0} - 0", "{0} + 0", "{0} * 2", "{0} / 3", "1 - {0}", "{0} + 0.5", "F.leaky_relu({0})", "F.elu({0})",
    "{0}.pow(2)", "{0}.reciprocal().clamp(-2, 2)", "F.hardtanh({0})", "{0}.sign()", "F.softplus({0})", "F.logsigmoid({0})",
)  # fmt: skip


def unary(room: Room) -> bool:
    name, value = room.pick(_is_float) or (None, None)
    return value is not None and room.add(room.source.choice(UNARY), name)


BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 1)", "torch.maximum({0}, {1})", "torch.where({0} > {1}, {0}, {1})",
    "torch.addcmul({0}, {0}, {1})", "{0}.lerp({1}, 0.3)", "torch.atan2({0}, {1})", "{0} * ({1} > 0)", "{0} + {1}.to({0}.dtype)",
    "{0} + {0} * {1}",
)  # fmt: skip


def binary(room: Room) -> bool:
    name, value = room.pick() or (None, None)
    if value is None:
        return False
    other = room.pick(lambda v: _broadcasts(v, value)) or (name, value)
    pair = (name, other[0]) if room.source.random() < 0.5 else (other[0], name)
    return room.add(room.source.choice(BINARY), *pair)


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a.shape), reversed(b.shape)))


def cast(room: Room) -> bool:
    """To another dtype, and often on to a third, or twice and together."""
    name, value = room.pick() or (None, None)
    if value is None:
        return False
    source = room.source
    wanted = source.choice((*FLOATS, *FLOATS, "torch.float16"))
    if source.random() < 0.15:
        wanted = source.choice(("torch.int64", "torch.int32", "torch.bool"))
    if not room.add(f"{{0}}.to({wanted})", name):
        return False
    first = room.lines[-1].results[0]
    if source.random() < 0.5:
        room.add(f"{{0}}.to({source.choice(FLOATS)})", first)
    elif room.add(f"{{0}}.to({source.choice((*FLOATS, 'torch.float16'))})", name):
        room.add("{0} * {1}", first, room.lines[-1].results[0])
    return True


def constant(room: Room) -> bool:
    """Numbers that are the same at every step, and masks made of them."""
    name, value = room.pick(_is_float) or (None, None)
    if value is None:
        return False
    source, shape = room.source, list(value.shape)
    number = source.choice((0, 1, 2, 0.5, -1.0))
    last = shape[-1] if shape else 1
    forms = [
        f"{{0}} + torch.ones({shape}) * {number}", f"{{0}} * torch.full_like({{0}}, {number})",
        "{0} + torch.zeros_like({0})", f"{{0}} * (torch.ones({shape}) / 3 - {number})",
        f"{{0}} + torch.arange({last})", f"{{0}}.masked_fill(torch.arange({last}) > 1, {number})",
        f"torch.where(torch.zeros({shape}, dtype=torch.bool), {{0}}, {{0}} * 2)",
        f"{{0}} * torch.full((), {number}).expand({shape}).to({{0}}.dtype)", f"{{0}} * torch.tensor({float(number)})",
        f"{{0}} * {{0}}.new_ones({shape})", "{0}.tril()" if len(shape) >= 2 else "{0} * 1.0",
        f"{{0}} + (torch.ones({shape}, dtype=torch.int64) * 3 + 0).to(torch.bfloat16)",
    ]  # fmt: skip
    return room.add(source.choice(forms), name)


def compared(room: Room) -> bool:
    """Booleans and integers, and values that depend on them."""
    source = room.source
    name, value = room.pick(lambda v: v.dim() >= 1 and v.numel()) or (None, None)
    if value is None:
        return False
    d = source.randrange(value.dim())
    forms = [
        "({0} > 0)", "({0} <= 0.5).to(torch.int64)", f"{{0}}.argmax({d})", "(({0} > 0) & ({0} < 1)).float()",
        f"({{0}} != 0).sum({d})", f"{{0}}.cumsum({d})", f"{{0}}.gather({d}, {{0}}.argsort({d}))",
        f"{{0}}.index_select({d}, torch.tensor([0, {value.shape[d] - 1}, 0]))", f"{{0}}.sort({d})[0]",
        f"{{0}}.topk(1, {d})[0]",
    ]  # fmt: skip
    return room.add(source.choice(forms), name)


def chosen(room: Room) -> bool:
    """Gathers by one index for a whole batch, and counts of what was chosen."""
    source = room.source
    found = room.pick(lambda v: v.dim() >= 3 and v.numel() and v.dtype == torch.float32)
    found = found or room.pick(lambda v: v.dim() == 2 and v.numel() and v.dtype == torch.float32)
    if found is None:
        return False
    name, value = found
    rows, last = value.shape[-2:]
    index = f"(torch.arange({rows})[:, None] - torch.arange({source.choice((1, last, 5))})[None, :]).abs().clamp(0, {last - 1})"
    forms = [
        f"{{0}}.gather(-1, {index}.expand(*{{0}}.shape[:-1], -1))",
        f"{{0}} * (torch.zeros({last}) + torch.bincount({{0}}.detach().argmax(-1).flatten(), minlength={last}))",
        f"{{0}} / torch.full((), {source.choice((2.0, 3.0, 48.0))}).sqrt()",
    ]
    return room.add(source.choice(forms), name)


def equal_again(room: Room) -> bool:
    """A line that is there already, once more."""
    lines = [line for line in room.lines if len(line.results) == 1 and "_(" not in line.code]
    if not lines:
        return False
    line = room.source.choice(lines)
    return room.add(line.code, *line.reads)


# ---- reductions and products ----


def reduced(room: Room) -> bool:
    source = room.source
    name, value = room.pick(lambda v: v.is_floating_point() and v.dim() >= 1 and v.numel()) or (None, None)
    if value is None:
        return False
    dims = source.sample(range(value.dim()), source.randint(1, value.dim()))
    keep = source.random() < 0.5
    d = dims[0]
    forms = [
        f"{{0}}.sum({dims}, keepdim={keep})", f"{{0}}.mean({dims}, keepdim={keep})", f"{{0}}.amax({dims}, keepdim={keep})",
        f"{{0}}.var({dims}, correction=0, keepdim={keep})", f"{{0}}.logsumexp({dims}, keepdim={keep})", f"{{0}}.softmax({d})",
        f"{{0}}.log_softmax({d})", f"({{0}} + 0.1).norm(dim={d}, keepdim={keep})", f"F.normalize({{0}} + 0.3, dim={d})",
        "{0}.sum()", f"{{0}}.mean({d}, dtype=torch.float32)", f"{{0}}.max({d})[0]", f"{{0}}.sum({dims}).unsqueeze({min(dims)})",
        f"F.layer_norm({{0}}, [{value.shape[-1]}])",
    ]  # fmt: skip
    return room.add(source.choice(forms), name)


def product(room: Room) -> bool:
    """matmul, linear, einsum with another value or with a new parameter."""
    source = room.source
    name, value = room.pick(
        lambda v: v.dtype in (torch.float32, torch.float64, torch.bfloat16) and v.dim() >= 1 and v.numel()
    ) or (
        None,
        None,
    )
    if value is None:
        return False
    width, dtype = value.shape[-1], str(value.dtype)
    if source.random() < 0.5:
        out = room.size()
        weight = room.parameter([out, width], 0.5, dtype if dtype != "torch.float32" else "")
        forms = [
            f"F.linear({{0}}, {weight})",
            f"{{0}} @ {weight}.t()",
            f"torch.einsum('...i,oi->...o', {{0}}, {weight})",
        ]
        if value.dim() == 2:
            forms.append(f"torch.addmm({weight}[:, 0], {{0}}, {weight}.t())")
        return room.add(source.choice(forms), name)
    same = room.pick(lambda v: v.dim() == value.dim() >= 2 and v.dtype == value.dtype and v.shape[-1] == width)
    if same is None:
        return False
    forms = [
        "{0} @ {1}.transpose(-1, -2)",
        "{0}.transpose(-1, -2) @ {1}",
        "torch.einsum('...ai,...bi->...ab', {0}, {1})",
    ]
    if value.dim() == 3:
        forms += ["torch.bmm({0}, {1}.transpose(1, 2))", "torch.einsum('abi,cbi->bac', {0}, {1})",
                  "torch.einsum('abi,acj->bcij', {0}, {1})"]  # fmt: skip
    if value.dim() == 4:
        forms += ["torch.einsum('blhd,bmhd->bhlm', {0}, {1})", "torch.einsum('abcd,abed->cabe', {0}, {1})"]
    return room.add(source.choice(forms), name, same[0])


def attention(room: Room) -> bool:
    """Attention over a value of four dimensions, with masks that say something, or nothing."""
    source = room.source
    name, value = room.pick(lambda v: v.dim() == 4 and v.dtype == torch.float32 and v.numel()) or (None, None)
    if value is None:
        return False
    tokens = value.shape[2]
    mask = source.choice(
        ("", "", ", is_causal=True", f", attn_mask=torch.ones({tokens}, {tokens}, dtype=torch.bool).tril()",
         f", attn_mask=torch.ones({tokens}, {tokens}, dtype=torch.bool)", f", attn_mask=torch.zeros({tokens}, {tokens})",
         f", attn_mask=attention_mask('band', {tokens})", f", attn_mask=attention_mask('ahead', {tokens})",
         f", attn_mask=torch.full(({tokens}, {tokens}), float('-inf')).triu(1)")
    )  # fmt: skip
    other = room.pick(lambda v: v.shape == value.shape and v.dtype == value.dtype) or (name, value)
    return room.add(f"F.scaled_dot_product_attention({{0}}, {{1}}, {{0}} * 0.5{mask})", name, other[0])


# ---- writes ----


def write(room: Room) -> bool:
    """In place: into a fresh copy, into a view of one, or into whatever autograd allows."""
    source = room.source
    name, value = room.pick(lambda v: v.is_floating_point() and v.numel()) or (None, None)
    if value is None:
        return False
    if source.random() < 0.7:
        if not room.add(source.choice(("{0}.clone()", "{0} + 1", "{0} * 2")), name):
            return False
        name = room.lines[-1].results[0]
        value = room.values[name]
    elif not name.startswith("v") or value.is_leaf:
        return False
    forms = [
        "{0}.mul_(0.5)",
        "{0}.add_(1)",
        "{0}.relu_()",
        "{0}.tanh_()",
        "{0}.zero_()",
        "{0}.neg_()",
        "{0}.clamp_(-1, 1)",
    ]
    if value.dim():
        forms += ["{0}[..., ::2].mul_(0.7)", "{0}[0].fill_(0.3)", "{0}.select(-1, 0).add_(0.5)", "{0}.transpose(0, -1).mul_(2)",
                  "{0}.view(-1)[:1].zero_()", "{0}[..., :1].copy_({0}[..., -1:].clone())"]  # fmt: skip
        if value.dim() >= 2:
            forms.append("{0}.masked_fill_({0}[..., :1] > 0, 0.1)")
    if source.random() < 0.25 and value.dim():  # as Python writes it
        statements = ["{0}[..., 0] = 0.5", "{0}[{0} > 0.2] = 0.1", "{0}[..., -1:] *= 2", "{0} += 1", "{0}[0] -= {0}[-1].detach()",
                      "{0}[torch.tensor([0, 0])] += 0.3", "{0}[:, 0] = {0}[:, -1].clone()"]  # fmt: skip
        return room.add(source.choice(statements), name, results=0)
    form = source.choice(forms)
    return room.add(form, name, results=source.choice((0, 1)))


def buffer(room: Room) -> bool:
    """State that the forward reads, and writes or replaces."""
    source = room.source
    name, value = room.pick(lambda v: v.dtype == torch.float32 and v.numel() and v.dim() <= 3) or (None, None)
    if value is None:
        return False
    read = room.add_member(f"nn.Buffer(torch.randn({list(value.shape)}))", "b")
    write = source.choice(
        (f"{read}.add_({{0}}.detach())", f"{read}.mul_(0.9)", f"{read}.copy_({read}.detach() * 0.5 + {{0}}.detach())",
         f"{read}.lerp_({{0}}.detach(), 0.1)", f"{read} = 0.5 * {read} + {{0}}.detach()", "")
    )  # fmt: skip
    before = source.random() < 0.5
    if write and before and not room.add(write, name, results=0):
        return False
    if not room.add(f"{{0}} + {read} * 0.1", name):
        return False
    if write and not before:
        room.add(write, name, results=0)
    return True


def noise(room: Room) -> bool:
    """Random numbers, some of which nobody reads."""
    source = room.source
    name, value = room.pick(lambda v: v.dtype == torch.float32 and v.numel()) or (None, None)
    if value is None:
        return False
    forms = ["{0} + torch.randn_like({0}) * 0.1", "F.dropout({0}, 0.4)", "{0} * torch.rand({0}.shape)",
    "{0} * torch.bernoulli({0}.detach().sigmoid())",
             "{0} * (torch.rand_like({0}) > 0.3)", "{0} + torch.empty_like({0}).uniform_(-0.1, 0.1)",
             "{0} + torch.normal(0.0, 0.1, {0}.shape)"]  # fmt: skip
    return room.add(source.choice(forms), name)


def counter(room: Room) -> bool:
    """A buffer that is written and that nothing reads: numbers of steps, averages."""
    source = room.source
    name, value = room.pick(lambda v: v.dtype == torch.float32 and v.numel()) or (None, None)
    if value is None:
        return False
    if source.random() < 0.5:
        held = room.add_member("nn.Buffer(torch.zeros((), dtype=torch.int64))", "b")
        return room.add(source.choice((f"{held}.add_(1)", f"{held}.add_(({{0}} > 0).sum())")), name, results=0)
    held = room.add_member("nn.Buffer(torch.zeros(()))", "b")
    forms = (
        f"{held}.lerp_({{0}}.detach().mean(), 0.2)",
        f"{held}.copy_({{0}}.detach().abs().max())",
        f"{held}.mul_(0.9).add_({{0}}.detach().sum())",
    )
    return room.add(source.choice(forms), name, results=0)


def solved(room: Room) -> bool:
    """Small systems of equations, distances and norms."""
    source = room.source
    name, value = room.pick(
        lambda v: v.dtype in (torch.float32, torch.float64) and v.numel() and v.dim() in (2, 3)
    ) or (None, None)
    if value is None:
        return False
    size, dtype = value.shape[-2], value.dtype
    positive = f"({{0}} @ {{0}}.mT + 2 * torch.eye({size}, dtype={dtype}))"
    forms = [
        f"torch.linalg.inv({positive})", f"torch.linalg.solve({positive}, {{0}})", f"torch.linalg.slogdet({positive})[1]",
        f"torch.linalg.cholesky({positive})", "torch.cdist({0}, {0} + 1)", "torch.linalg.vector_norm({0} + 0.1, dim=-1)",
        "torch.linalg.matrix_norm({0} + 0.1)", f"torch.matrix_exp({positive} * 0.1)",
        "torch.pdist({0} + 0)" if value.dim() == 2 else "{0}.mT @ {0}",
    ]  # fmt: skip
    return room.add(source.choice(forms), name)


TABLE: dict[Maker, float] = {
    noise: 0.5, counter: 1.0, solved: 0.4, reshape: 3, turn: 3, ones_dimension: 3, part: 2.5, strided: 0.5, pieces: 1, joined: 1,
    copied: 1, unary: 3, binary: 3.5,
    cast: 2, constant: 1.2, chosen: 2, compared: 0.8, equal_again: 0.7, reduced: 1.5, product: 1.5, attention: 1.5, write: 1.3,
    buffer: 0.5,
}  # fmt: skip
"""How likely each is."""
