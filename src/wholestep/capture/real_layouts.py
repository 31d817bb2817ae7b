"""Memory orders that kernels give, where torch's rules for tensors without data say others.

In: an operator on tensors without data. Out: its result in the order that the kernel would give. For these operators torch
works the order out from arithmetic that stands for them, in which the operands come in another order or keep theirs. A trace
relies on it: autograd hands some kernels (`native_group_norm_backward`) a gradient after `.contiguous()`, which leaves nothing
in the graph where the order is said to be the plain one, and the kernel then reads another tensor than was meant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table, meta_table
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_contiguous_strides_for,
    suggest_memory_format,
)  # fmt: skip
from torch._subclasses.fake_impls import op_implementations_dict
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
Order = Callable[..., Any]
"""The strides of a result, from the operator's arguments."""


def _plain(first: Tensor, *rest: Any) -> Any:
    return make_contiguous_strides_for(first.shape)


def _plain_of_second(grad: Tensor, self: Tensor, *rest: Any) -> Any:
    return make_contiguous_strides_for(self.shape)


def _of_second(grad: Tensor, self: Tensor, *rest: Any) -> Any:
    return compute_elementwise_output_strides(self)


def _of_both(grad: Tensor, self: Tensor, *rest: Any) -> Any:
    """As a kernel that works element by element orders its result: the first operand has the first word."""
    return compute_elementwise_output_strides(grad, self)


def _of_batch_norm(self: Tensor, *rest: Any) -> Any:
    """A CPU knows two orders, a GPU takes any."""
    order = suggest_memory_format(self)
    if self.device.type != "cpu" or order != torch.contiguous_format:
        return compute_elementwise_output_strides(self)
    return _plain(self)


def _of_log_sigmoid(self: Tensor) -> Any:
    return _plain(self) if self.device.type == "cpu" else compute_elementwise_output_strides(self)


ORDERS: dict[Any, Order] = {
    aten.mse_loss_backward.default: _plain_of_second,
    aten.smooth_l1_loss_backward.default: _plain_of_second,
    aten.huber_loss_backward.default: _plain_of_second,
    aten.binary_cross_entropy_backward.default: _of_second,
    aten._log_softmax_backward_data.default: _plain,
    aten.native_layer_norm_backward.default: _plain,
    aten.native_batch_norm.default: _of_batch_norm,
    aten._native_batch_norm_legit.default: _of_batch_norm,
    aten._native_batch_norm_legit.no_stats: _of_batch_norm,
    aten._native_batch_norm_legit_functional.default: _of_batch_norm,
    aten._native_batch_norm_legit_no_training.default: _of_batch_norm,
    aten.native_batch_norm_backward.default: lambda grad, self, *rest: _of_batch_norm(self),
    aten.log_sigmoid_forward.default: _of_log_sigmoid,
    aten.elu_backward.default: lambda grad, a, b, c, is_result, self: _of_both(grad, self),
    aten.hardtanh_backward.default: _of_both,
    aten.native_dropout_backward.default: _of_both,
    aten.xlogy.Tensor: _of_both,
    aten.pow.Scalar: lambda base, exponent: _plain(exponent),
    aten.softplus_backward.default: _of_both,
    aten.logit_backward.default: _of_both,
    aten.hardswish_backward.default: _of_both,
    aten.hardsigmoid_backward.default: _of_both,
}


def _rule(order: Order, made_by: Callable[..., Any], mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        made = made_by(*args, **kwargs)
        # nothing to put right; and asking for the order of symbolic sizes would tie the graph to what is answered
        if all(value.is_contiguous() for value in tree_leaves(args) if isinstance(value, Tensor)):
            return made
        strides = order(*args, **kwargs)
        if isinstance(made, Tensor):
            return _laid_out(made, strides)
        alike = 2 if func is aten.log_sigmoid_forward.default else 1  # the others are sums, or of parameters
        return tuple(_laid_out(one, strides) if at < alike else one for at, one in enumerate(made))


def _laid_out(made: Any, strides: Any) -> Any:
    if made is None or made.dim() != len(strides):  # a gradient that nobody asks for; broadcast operands
        return made
    return torch.empty_strided(made.shape, strides, dtype=made.dtype, device=made.device)


def install() -> None:
    """Have torch take these rules in place of the arithmetic, for which an entry among its own rules is needed too."""
    for operator, order in ORDERS.items():
        made_by = decomposition_table[operator]
        op_implementations_dict[operator] = functools.partial(_rule, order, made_by)
        meta_table.setdefault(operator, made_by)
