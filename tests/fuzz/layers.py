"""Lines that call modules: those of torch.nn and of `blocks.py`, on values whose last sizes they fit.

Every maker takes a Room, adds a line (or a few), and says whether it did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.fuzz.operators import Maker

if TYPE_CHECKING:
    from tests.fuzz.draw import Room

VOCABULARY = 9


def begin(room: Room) -> None:
    """Tokens, rows or images, and a first layer that has parameters."""
    source = room.source
    kind = source.random()
    rows, tokens, width = room.size(), room.size(), source.choice((1, 2, 4, 4, 6, 8))
    if kind < 0.3:
        ids = room.add_input(f"torch.randint(0, {VOCABULARY}, ({rows}, {tokens}))")
        if source.random() < 0.15:
            bag = f"nn.EmbeddingBag({VOCABULARY}, {width}, mode={source.choice(('sum', 'mean', 'max'))!r})"
            room.add(room.add_member(bag) + "({0})", ids)
        more = source.choice(("", "", "", ", padding_idx=0", ", scale_grad_by_freq=True", ", max_norm=1.0"))
        room.add(room.add_member(f"nn.Embedding({VOCABULARY}, {width}{more})") + "({0})", ids)
    elif kind < 0.55:
        x = room.add_input(f"torch.randn({rows}, {tokens}, {width})")
        room.add(room.add_member(f"nn.Linear({width}, {width})") + "({0})", x)
    elif kind < 0.75:
        x = room.add_input(f"torch.randn({rows}, {width})")
        room.add(
            room.add_member(f"nn.Linear({width}, {source.choice((width, 4))}, bias={source.random() < 0.7})") + "({0})",
            x,
        )
    elif kind < 0.78:
        x = room.add_input(f"torch.randn({rows}, {source.choice((1, 2))}, 2, {source.choice((1, 3))}, 3)")
        room.add(
            room.add_member(f"nn.Conv3d({room.values[x].shape[1]}, {source.choice((1, 2))}, {source.choice((1, 2))})")
            + "({0})",
            x,
        )
    else:
        side, channels = source.choice((1, 2, 4, 5)), source.choice((1, 2, 3))
        x = room.add_input(f"torch.randn({rows}, {channels}, {side}, {source.choice((1, side))})")
        out, kernel = source.choice((1, 2, 4)), source.choice((1, 1, 3))
        room.add(room.add_member(f"nn.Conv2d({channels}, {out}, {kernel}, padding={kernel // 2})") + "({0})", x)


def _plain(value: torch.Tensor) -> bool:
    return value.dtype == torch.float32 and value.numel() > 0


def _call(room: Room, code: str, name: str) -> bool:
    """A new module, called on a value; the value is often added again."""
    if not room.add(room.add_member(code) + "({0})", name):
        return False
    made = room.lines[-1].results[0]
    if room.values[made].shape == room.values[name].shape and room.source.random() < 0.4:
        room.add("{0} + {1}", name, made)
    return True


def linear(room: Room) -> bool:
    name, value = room.pick(lambda v: _plain(v) and v.dim() >= 1) or (None, None)
    if value is None:
        return False
    width = value.shape[-1]
    out = room.source.choice((width, width, 1, 3, 4))
    return _call(room, f"nn.Linear({width}, {out}, bias={room.source.random() < 0.7})", name)


def normed(room: Room) -> bool:
    name, value = room.pick(lambda v: _plain(v) and v.dim() >= 2) or (None, None)
    if value is None:
        return False
    channels, width = value.shape[1], value.shape[-1]
    codes = [
        f"nn.LayerNorm({width})", f"nn.RMSNorm({width})", f"nn.LayerNorm({list(value.shape[1:])})",
        f"nn.LayerNorm({width}, elementwise_affine=False)", f"nn.RMSNorm({width}, elementwise_affine=False, eps=1e-3)",
        f"nn.GroupNorm(1, {channels}, affine=False)",
    ]  # fmt: skip
    if value.dim() == 4:
        codes += [
            f"nn.BatchNorm2d({channels})", f"nn.GroupNorm(1, {channels})", f"nn.InstanceNorm2d({channels}, affine=True)",
            f"nn.BatchNorm2d({channels}, track_running_stats=False)", f"nn.InstanceNorm2d({channels})",
            f"nn.BatchNorm2d({channels}, affine=False, momentum=0.3)", f"nn.InstanceNorm2d({channels}, track_running_stats=True)",
            f"nn.BatchNorm2d({channels}, momentum=None)", f"nn.BatchNorm2d({channels}).eval()", "nn.LocalResponseNorm(2)",
        ]  # fmt: skip
    elif value.dim() <= 3:
        codes += [
            f"nn.BatchNorm1d({channels})", f"nn.BatchNorm1d({channels}, momentum=0.5)", f"nn.GroupNorm({channels}, {channels})",
            f"nn.BatchNorm1d({channels}, track_running_stats=False, affine=False)",
        ]  # fmt: skip
    return _call(room, room.source.choice(codes), name)


def attended(room: Room) -> bool:
    """Self-attention with one head and with several, in all the ways it is written."""
    source = room.source
    name, value = room.pick(lambda v: _plain(v) and v.dim() == 3) or (None, None)
    if value is None:
        return False
    width = value.shape[-1]
    heads = source.choice([h for h in (1, 1, 2, 4) if width % h == 0])
    if source.random() < 0.35:
        first = source.random() < 0.5
        module = room.add_member(
            f"nn.MultiheadAttention({width}, {heads}, batch_first={first}, bias={source.random() < 0.7})"
        )
        tokens = value.shape[1] if first else value.shape[0]
        hidden = (
            f", attn_mask=torch.ones({tokens}, {tokens}, dtype=torch.bool).triu(1)" if source.random() < 0.3 else ""
        )
        return room.add(f"{module}({{0}}, {{0}}, {{0}}, need_weights={source.random() < 0.4}{hidden})[0]", name)
    if source.random() < 0.15:
        more = f"dropout={source.choice((0.0, 0.0, 0.3))}, batch_first=True, norm_first={source.random() < 0.5}"
        return _call(room, f"nn.TransformerEncoderLayer({width}, {heads}, 6, {more})", name)
    form = source.choice(("sdpa", "sdpa", "windows", "windows", "matmul", "einsum"))
    mask = source.choice(("none", "causal", "whole", "band", "band", "ahead"))
    return _call(room, f"SelfAttention({width}, {heads}, {form!r}, {mask!r})", name)


def convolved(room: Room) -> bool:
    source = room.source
    name, value = room.pick(lambda v: _plain(v) and v.dim() in (3, 4)) or (None, None)
    if value is None:
        return False
    channels, dims = value.shape[1], value.dim() - 2
    if source.random() < 0.2:  # cut into patches
        return _call(
            room, f"nn.Conv{dims}d({channels}, {source.choice((1, 2, 4))}, 2, 2, bias={source.random() < 0.7})", name
        )
    kernel, stride = source.choice((1, 1, 2, 3)), source.choice((1, 1, 2, 3))
    groups = source.choice((1, 1, channels))
    out = source.choice((channels, 2 * channels)) if groups > 1 else source.choice((channels, 1, 2, 4))
    kind = f"Conv{dims}d" if source.random() < 0.85 else f"ConvTranspose{dims}d"
    more = source.choice(("", "", "", ", dilation=2", ", bias=False"))
    if "Transpose" not in kind:
        more += source.choice(("", "", "", ", padding_mode='circular'", ", padding_mode='replicate'"))
    return _call(room, f"nn.{kind}({channels}, {out}, {kernel}, {stride}, {kernel // 2}, groups={groups}{more})", name)


def pooled(room: Room) -> bool:
    name, value = room.pick(lambda v: _plain(v) and v.dim() == 4) or (None, None)
    if value is None:
        return False
    codes = ("nn.MaxPool2d(2, 1, 1)", "nn.AvgPool2d(2, 1, 1)", "nn.AdaptiveAvgPool2d(1)", "nn.Upsample(scale_factor=2)",
             "nn.MaxPool2d(1)", "nn.Flatten(2)", "nn.PixelShuffle(1)", "nn.PixelUnshuffle(2)", "nn.PixelShuffle(2)",
             "nn.MaxPool2d(2, 2, ceil_mode=True)", "nn.MaxPool2d(2, 1, dilation=2)", "nn.LPPool2d(2, 2, 1)",
             "nn.AdaptiveMaxPool2d(2)",
             "nn.AvgPool2d(2, 2, 1, count_include_pad=False)", "nn.UpsamplingBilinear2d(scale_factor=2)", "nn.ReflectionPad2d(1)",
             "nn.ZeroPad2d((1, 0, 0, 2))", f"nn.ChannelShuffle({value.shape[1]})", "nn.Unfold(2, padding=1, stride=2)")  # fmt: skip
    return _call(room, room.source.choice(codes), name)


def activated(room: Room) -> bool:
    name, value = room.pick(lambda v: _plain(v) and v.dim() >= 1) or (None, None)
    if value is None:
        return False
    codes = (
        "nn.GELU()",
        "nn.SiLU()",
        "nn.ReLU()",
        "nn.Tanh()",
        "nn.Softmax(-1)",
        "nn.PReLU()",
        "nn.Hardswish()",
        "nn.Identity()",
    )
    other = room.source.random()
    if other < 0.25:
        codes = ("nn.Dropout(0.3)", "nn.Dropout(0.5)", "nn.Dropout(0.0)", "nn.Dropout1d(0.4)", "nn.Dropout2d(0.4)",
        "nn.AlphaDropout(0.2)",
                 "nn.RReLU()")  # fmt: skip
    elif other < 0.45:
        codes = (
            "nn.SELU()", "nn.CELU(0.7)", "nn.Mish()", "nn.Softsign()", "nn.LogSigmoid()", "nn.Threshold(0.1, 0.2)",
            "nn.Softmin(-1)",
            "nn.LogSoftmax(-1)", "nn.Softshrink(0.2)", "nn.Tanhshrink()", "nn.ReLU6()", "nn.Hardsigmoid()",
            "nn.GELU(approximate='tanh')",
            "nn.ReLU(inplace=True)", "nn.ELU(inplace=True)", "nn.Softplus(2.0)",
        )  # fmt: skip
    return _call(room, room.source.choice(codes), name)


def gated(room: Room) -> bool:
    """A gate times a value, in the ways that people write it; the gate may be read by others too."""
    source = room.source
    name, value = room.pick(lambda v: _plain(v) and v.dim() >= 2) or (None, None)
    if value is None:
        return False
    gate = source.choice(
        ("silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "leaky_relu", "hardswish", "mish", "elu")
    )
    form = source.choice(("apart", "halves", "twice", "shared"))
    return _call(room, f"Gated({value.shape[-1]}, {source.choice((1, 3, 8))}, {gate!r}, {form!r})", name)


def stacked(room: Room) -> bool:
    """Equal layers: borders for regions, plans and early updates."""
    name, value = room.pick(lambda v: _plain(v) and v.dim() >= 2) or (None, None)
    if value is None:
        return False
    kind = room.source.choice(("Feedforward", "Gated"))
    return _call(room, f"Repeated({value.shape[-1]}, {room.source.choice((2, 3))}, {kind})", name)


def tied(room: Room) -> bool:
    """A module or a parameter that is there already, used again: transposed, as an output layer, or as it was."""
    source = room.source
    reused = ("nn.Linear", "nn.Embedding", "Feedforward", "nn.LayerNorm")
    known = [(n, c) for n, c in room.members if c.startswith(reused) and getattr(room.module, n).weight is not None]
    if not known:
        return False
    name, code = source.choice(known)
    module = getattr(room.module, name)
    width = module.weight.shape[-1]
    value = room.pick(lambda v: _plain(v) and v.dim() >= 1 and v.shape[-1] == width)
    if value is None:
        return False
    if code.startswith("nn.Linear") and module.weight.shape[0] == width and source.random() < 0.4:  # three times in all
        return room.add(f"self.{name}(self.{name}({{0}}).tanh())", value[0])
    if code.startswith(("nn.Linear", "nn.LayerNorm")) and source.random() < 0.5:
        return room.add(f"self.{name}({{0}})", value[0])
    if code.startswith("nn.LayerNorm"):
        return room.add(f"{{0}} * self.{name}.weight", value[0])
    return room.add(f"F.linear({{0}}, self.{name}.weight)", value[0])


def recurrent(room: Room) -> bool:
    """A small cell, used a few times."""
    name, value = room.pick(lambda v: _plain(v) and v.dim() == 2) or (None, None)
    if value is None:
        return False
    width = value.shape[-1]
    if room.source.random() < 0.3:
        return room.add(room.add_member(f"nn.LSTMCell({width}, 3)") + "({0})[0]", name)
    cell = room.add_member(f"nn.{room.source.choice(('GRUCell', 'RNNCell'))}({width}, {width})")
    return room.add(f"{cell}({{0}}, {cell}({{0}}))", name)


def sequence(room: Room) -> bool:
    """A recurrent layer over a whole sequence."""
    source = room.source
    name, value = room.pick(lambda v: _plain(v) and v.dim() == 3) or (None, None)
    if value is None:
        return False
    kind, out = source.choice(("LSTM", "GRU", "RNN")), source.choice((1, 3))
    more = source.choice(("", ", bidirectional=True", ", num_layers=2", ", bias=False", ", batch_first=True"))
    return room.add(room.add_member(f"nn.{kind}({value.shape[-1]}, {out}{more})") + "({0})[0]", name)


def special(room: Room) -> bool:
    """Layers with state or a derivative of their own, or that are made of others."""
    source = room.source
    name, value = room.pick(lambda v: _plain(v) and v.dim() >= 2) or (None, None)
    if value is None:
        return False
    width = value.shape[-1]
    if source.random() < 0.15:
        return room.add("Twice.apply({0})", name)
    if source.random() < 0.1:
        return room.add(room.add_member(f"nn.Bilinear({width}, {width}, 2)") + "({0}, {0})", name)
    codes = [
        f"Averaged({width}, read={source.random() < 0.5})", f"Averaged({width})", f"Quantised({width})",
        f"Checkpointed({width}, {source.choice((0.0, 0.3))})", f"nn.utils.parametrizations.weight_norm(nn.Linear({width}, 3))",
        f"nn.utils.parametrizations.spectral_norm(nn.Linear({width}, 3))", f"nn.Linear({width}, 3).requires_grad_(False)",
        f"nn.Sequential(nn.Linear({width}, 4), nn.ReLU(inplace=True), nn.Linear(4, {width}))",
    ]  # fmt: skip
    return _call(room, source.choice(codes), name)


def unread(room: Room) -> bool:
    """A layer that is called for its statistics alone."""
    name, value = room.pick(lambda v: _plain(v) and v.dim() in (2, 3)) or (None, None)
    if value is None:
        return False
    return room.add(room.add_member(f"nn.BatchNorm1d({value.shape[1]})") + "({0}.detach())", name, results=0)


TABLE: dict[Maker, float] = {
    special: 1.2, unread: 0.5, linear: 3, normed: 2.5, attended: 5, convolved: 4, pooled: 1, activated: 2, gated: 1.5,
    stacked: 0.7, tied: 1, recurrent: 0.3,
    sequence: 0.3,
}  # fmt: skip
"""How likely each is."""
