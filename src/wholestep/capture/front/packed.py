"""Packed sequences in a loss: what torch.nn.utils.rnn packs and pads, by masks; recurrent layers on it as one operator each.

In: calls of pack_padded_sequence, pad_packed_sequence and of recurrent layers, while a loss is captured. Out: the same
PackedSequence, whose data are picked by a mask from the padded input, in torch's order; and in the place of its batch sizes a
`Sizes`. Lengths are data: one graph serves all. That they are valid, and that the longest sequence fills the padded input (which
tells how long the padded output is), is taken for granted and looked at in the step (assumed.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.nn.utils.rnn import PackedSequence

from wholestep.capture.front.assumed import assuming


class Sizes(NamedTuple):
    """The batch sizes of a packed sequence, while it is traced; the first is the number of sequences, as torch's is."""

    sequences: int
    counts: Tensor
    """(steps,) on the CPU: how many sequences reach each step of the padded input."""
    mask: Tensor
    """(steps, sequences) where the data are."""
    lengths: Tensor

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def pack_padded(input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> PackedSequence:
    """In the place of pack_padded_sequence."""
    lengths = lengths.to(torch.int64) if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64)
    order = None
    if enforce_sorted:
        if (lengths[1:] > lengths[:-1]).any():
            raise RuntimeError("lengths are not sorted")
    else:
        lengths, order = torch.sort(lengths, descending=True)
        order = order.to(input.device)
        input = input.index_select(0 if batch_first else 1, order)
    padded = input.transpose(0, 1) if batch_first else input
    steps = padded.shape[0]
    if (lengths < 1).any() or (lengths > steps).any():
        raise RuntimeError("lengths do not fit the padded input")
    mask = torch.arange(steps)[:, None] < lengths[None, :]
    here = mask.to(input.device)
    return PackedSequence(padded[here], Sizes(padded.shape[1], mask.sum(1), here, lengths), order, None)  # type: ignore[arg-type]


def pad_packed(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """In the place of pad_packed_sequence."""
    data, sizes = sequence.data, sequence.batch_sizes
    if not isinstance(sizes, Sizes):
        raise NotImplementedError("a packed sequence that was made outside of the loss; pack it inside")
    steps = sizes.mask.shape[0]
    if total_length is None:
        if sizes.counts[-1] < 1:
            raise RuntimeError("the padded input is longer than its longest sequence")
    elif total_length < steps:
        raise NotImplementedError("total_length is less than the length of the padded input")
    padded = data.new_full((steps, sizes.sequences, *data.shape[1:]), padding_value).index_put((sizes.mask,), data)
    if total_length is not None and total_length > steps:
        missing = data.new_full((total_length - steps, sizes.sequences, *data.shape[1:]), padding_value)
        padded = torch.cat([padded, missing])
    padded, lengths = padded.transpose(0, 1) if batch_first else padded, sizes.lengths
    if sequence.unsorted_indices is not None:
        padded = padded.index_select(0 if batch_first else 1, sequence.unsorted_indices)
        lengths = lengths[sequence.unsorted_indices.cpu()]
    return padded, lengths


def run_layers(
    kind: str, data: Tensor, sizes: Sizes, states: Any, weights: Any, biases: bool, layers: int, dropout: float, train: bool,
    both: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """torch.lstm and its kin on packed data, layer by layer."""
    ways, per_layer = (2 if both else 1), len(weights) // layers
    if len(weights) != layers * ways * (4 if biases else 2):
        raise NotImplementedError("a projection in a recurrent layer over packed sequences")
    given = states if isinstance(states, tuple | list) else (states,)
    finals = []
    for layer in range(layers):
        mine = [state[layer * ways : (layer + 1) * ways] for state in given]
        chosen = list(weights[layer * per_layer : (layer + 1) * per_layer])
        data, last_h, last_c, _, _ = torch.ops.ws.packed_recurrent(
            data, sizes.counts, mine[0], mine[1] if kind == "lstm" else None, chosen, kind, both
        )
        finals.append((last_h, last_c) if kind == "lstm" else (last_h,))
        if layer < layers - 1 and dropout > 0 and train:
            data = F.dropout(data, dropout)
    return (data, *(torch.cat(parts) for parts in zip(*finals)))


def _lstm(*args: Any) -> tuple[Tensor, ...]:
    return run_layers("lstm", *args)


def _gru(*args: Any) -> tuple[Tensor, ...]:
    return run_layers("gru", *args)


def _rnn_tanh(*args: Any) -> tuple[Tensor, ...]:
    return run_layers("rnn_tanh", *args)


def _rnn_relu(*args: Any) -> tuple[Tensor, ...]:
    return run_layers("rnn_relu", *args)


def _handler(ours: Callable[..., Any]) -> Callable[..., Any]:
    def handle(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """Dynamo's; None leaves the call to the default."""
        if not getattr(assuming, "on", False) or kwargs or len(args) != 9:
            return None
        second = args[1].realize()
        if Sizes not in (getattr(second, "value_type", None), getattr(second, "tuple_cls", None)):
            return None
        return tx.inline_user_function_return(UserFunctionVariable(ours), list(args), {})

    return handle


_handlers = TorchInGraphFunctionVariable._get_handlers()
for _function, _ours in (
    (torch.lstm, _lstm),
    (torch.gru, _gru),
    (torch.rnn_tanh, _rnn_tanh),
    (torch.rnn_relu, _rnn_relu),
):
    _handlers[_function] = _handler(_ours)
