"""The table of automatic mixed precision: which operators gain from a narrow type, and which must not have one.

In: an operator. Out: its class (for reports) and its rule:

    low      computed in the narrow type: its cost is arithmetic on tensor cores, which accumulate in float32
    wide     computed in float32: sums of many terms, or functions that leave the range of a narrow type
    total    a sum: reads what it is given and accumulates into float32 (no float32 copy of its argument is made)
    first    follows its first arguments (their number is in the table); the rest (weights, statistics) as they come
    saved    the backward of an operator that follows: in the type of the value its forward kept, as a gradient has the type of
             what it is the gradient of. Otherwise float32 would spread from the loss through all activation functions
    like     makes a tensor in the image of another: its `dtype` follows, where it named its argument's
    given    names its own result type: a cast of the user's stays what it is
    keep     computed as captured: unknown operators of other libraries, and every operator of the update
    follow   everything else: in the widest type of its arguments

The lists are those of torch's autocast on CUDA where it has an opinion; it has none about backward operators, which run there in
whatever type reaches them. Here the backward of a `low` operator is `low`, that of a `wide` one `wide`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import fx

from wholestep.graph.training_graph import phase_of

Rule = Literal["low", "wide", "total", "first", "saved", "like", "given", "keep", "follow"]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One family of operators."""

    family: str
    rule: Rule
    names: tuple[str, ...]
    positions: int | None = None
    """How many leading arguments the rule is about; None: all of them."""
    saved: int = 1
    """Rule `saved`: which argument is the value of the forward."""


# fmt: off
TABLE: tuple[Entry, ...] = (
    Entry("matmul", "low", (
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv", "aten::dot",
        "aten::linear", "aten::linear_backward", "aten::_addmm_activation",
    )),
    Entry("convolution", "low", ("aten::convolution", "aten::convolution_backward", "aten::_convolution")),
    # q, k, v and mask; grad, q, k, v, mask and out: the logsumexp after them is float32 by definition
    Entry("attention", "low", ("ws::attention",), 4),
    Entry("attention", "low", ("ws::attention_backward",), 6),
    # the bias, fourth and sixth, is added to scores that are float32
    Entry("attention", "low", ("ws::biased_attention",), 3),
    Entry("attention", "low", ("ws::biased_attention_backward",), 5),
    Entry("softmax", "wide", (
        "aten::_softmax", "aten::_log_softmax", "aten::_softmax_backward_data", "aten::_log_softmax_backward_data",
        "aten::logsumexp", "aten::_safe_softmax",
    )),
    Entry("loss", "wide", (
        "aten::nll_loss_forward", "aten::nll_loss_backward", "aten::nll_loss2d_forward", "aten::nll_loss2d_backward",
        "aten::mse_loss", "aten::mse_loss_backward", "aten::l1_loss", "aten::smooth_l1_loss",
        "aten::smooth_l1_loss_backward", "aten::huber_loss", "aten::huber_loss_backward",
        "aten::binary_cross_entropy", "aten::binary_cross_entropy_backward",
        "aten::binary_cross_entropy_with_logits", "aten::_ctc_loss", "aten::_ctc_loss_backward",
        "aten::soft_margin_loss", "aten::soft_margin_loss_backward", "aten::xlogy",
    )),
    Entry("norm", "wide", (
        "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::native_group_norm",
        "aten::native_group_norm_backward", "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward",
        "aten::linalg_vector_norm", "aten::norm", "aten::var", "aten::var_mean", "aten::std",
    )),
    # their kernels keep statistics in float32 whatever the type of the activations
    Entry("norm", "first", (
        "aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional",
        "aten::_batch_norm_with_update_functional", "aten::cudnn_batch_norm",
    ), 1),
    Entry("norm", "saved", ("aten::native_batch_norm_backward", "aten::batch_norm_backward"), 2),
    Entry("norm", "saved", ("aten::cudnn_batch_norm_backward",), 2, saved=0),
    Entry("activation", "saved", (
        "aten::threshold_backward", "aten::gelu_backward", "aten::silu_backward", "aten::tanh_backward",
        "aten::sigmoid_backward", "aten::leaky_relu_backward", "aten::hardtanh_backward", "aten::hardswish_backward",
        "aten::hardsigmoid_backward", "aten::mish_backward", "aten::glu_backward",
    )),
    Entry("activation", "saved", ("aten::elu_backward",), saved=5),
    Entry("pooling", "saved", (
        "aten::max_pool2d_with_indices_backward", "aten::avg_pool2d_backward", "aten::_adaptive_avg_pool2d_backward",
    )),
    Entry("sum", "total", ("aten::sum", "aten::mean", "aten::cumsum", "aten::prod", "aten::cumprod")),
    Entry("sum", "wide", (
        "aten::embedding_dense_backward", "aten::index_put", "aten::_unsafe_index_put", "aten::scatter_add",
        "aten::index_add",
    )),
    Entry("exp, log, pow", "wide", (
        "aten::exp", "aten::expm1", "aten::exp2", "aten::log", "aten::log1p", "aten::log2", "aten::log10", "aten::pow",
        "aten::rsqrt", "aten::reciprocal", "aten::softplus", "aten::softplus_backward", "aten::log_sigmoid_forward",
        "aten::log_sigmoid_backward", "aten::erfinv", "aten::tan", "aten::sinh", "aten::cosh", "aten::acos",
        "aten::asin",
    )),
    Entry("cast", "given", ("aten::_to_copy", "prims::convert_element_type")),
    Entry("made", "like", (
        "aten::ones_like", "aten::zeros_like", "aten::full_like", "aten::empty_like", "aten::new_zeros",
        "aten::new_ones", "aten::new_full", "aten::new_empty", "aten::rand_like", "aten::randn_like",
    )),
    Entry("dropout", "follow", ("ws::dropout",)),
)
# fmt: on

_BY_NAME = {name: entry for entry in TABLE for name in entry.names}
_KEEP = Entry("other", "keep", ())
_FOLLOW = Entry("other", "follow", ())
_UPDATE = Entry("update", "keep", ())


def schema_name(target: Any) -> str:
    """`aten::mm`, or the name of a Python function."""
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else getattr(target, "__name__", str(target))


def entry_of(node: fx.Node) -> Entry:
    """The line of the table that a node falls under."""
    if phase_of(node) == "update":
        return _UPDATE
    found = _BY_NAME.get(schema_name(node.target))
    if found is not None:
        return found
    known = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return _FOLLOW if known else _KEEP
