"""The table of automatic mixed precision: which operators gain from a narrow type, and which must not have one.

In: a node. Out: the family of its operator (for reports) and its rule. Operators of `ws` have theirs in their own files.

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

import torch
from torch import fx

from wholestep.graph.training_graph import phase_of
from wholestep.ops.record import Precision, Rule, record, record_of


def _rule(family: str, rule: Rule, names: tuple[str, ...], positions: int | None = None, saved: int = 1) -> None:
    record(*names, precision=Precision(family, rule, positions, saved))


# fmt: off
_rule("matmul", "low", (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv", "aten::dot",
    "aten::linear", "aten::linear_backward", "aten::_addmm_activation",
))
_rule("convolution", "low", ("aten::convolution", "aten::convolution_backward", "aten::_convolution"))
_rule("softmax", "wide", (
    "aten::_softmax", "aten::_log_softmax", "aten::_softmax_backward_data", "aten::_log_softmax_backward_data",
    "aten::logsumexp", "aten::_safe_softmax",
))
_rule("loss", "wide", (
    "aten::nll_loss_forward", "aten::nll_loss_backward", "aten::nll_loss2d_forward", "aten::nll_loss2d_backward",
    "aten::mse_loss", "aten::mse_loss_backward", "aten::l1_loss", "aten::smooth_l1_loss",
    "aten::smooth_l1_loss_backward", "aten::huber_loss", "aten::huber_loss_backward",
    "aten::binary_cross_entropy", "aten::binary_cross_entropy_backward",
    "aten::binary_cross_entropy_with_logits", "aten::_ctc_loss", "aten::_ctc_loss_backward",
    "aten::soft_margin_loss", "aten::soft_margin_loss_backward", "aten::xlogy",
))
_rule("norm", "wide", (
    "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::native_group_norm",
    "aten::native_group_norm_backward", "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward",
    "aten::linalg_vector_norm", "aten::norm", "aten::var", "aten::var_mean", "aten::std",
))
# their kernels keep statistics in float32 whatever the type of the activations
_rule("norm", "first", (
    "aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional",
    "aten::_batch_norm_with_update_functional", "aten::cudnn_batch_norm",
), 1)
_rule("norm", "saved", ("aten::native_batch_norm_backward", "aten::batch_norm_backward"), 2)
_rule("norm", "saved", ("aten::cudnn_batch_norm_backward",), 2, saved=0)
_rule("activation", "saved", (
    "aten::threshold_backward", "aten::gelu_backward", "aten::silu_backward", "aten::tanh_backward",
    "aten::sigmoid_backward", "aten::leaky_relu_backward", "aten::hardtanh_backward", "aten::hardswish_backward",
    "aten::hardsigmoid_backward", "aten::mish_backward", "aten::glu_backward",
))
_rule("activation", "saved", ("aten::elu_backward",), saved=5)
_rule("pooling", "saved", (
    "aten::max_pool2d_with_indices_backward", "aten::avg_pool2d_backward", "aten::_adaptive_avg_pool2d_backward",
))
_rule("sum", "total", ("aten::sum", "aten::mean", "aten::cumsum", "aten::prod", "aten::cumprod"))
_rule("sum", "wide", (
    "aten::embedding_dense_backward", "aten::index_put", "aten::_unsafe_index_put", "aten::scatter_add",
    "aten::index_add",
))
_rule("exp, log, pow", "wide", (
    "aten::exp", "aten::expm1", "aten::exp2", "aten::log", "aten::log1p", "aten::log2", "aten::log10", "aten::pow",
    "aten::rsqrt", "aten::reciprocal", "aten::softplus", "aten::softplus_backward", "aten::log_sigmoid_forward",
    "aten::log_sigmoid_backward", "aten::erfinv", "aten::tan", "aten::sinh", "aten::cosh", "aten::acos",
    "aten::asin",
))
_rule("cast", "given", ("aten::_to_copy", "prims::convert_element_type"))
_rule("made", "like", (
    "aten::ones_like", "aten::zeros_like", "aten::full_like", "aten::empty_like", "aten::new_zeros",
    "aten::new_ones", "aten::new_full", "aten::new_empty", "aten::rand_like", "aten::randn_like",
))
# fmt: on

_KEEP = Precision("other", "keep")
_FOLLOW = Precision("other", "follow")
_UPDATE = Precision("update", "keep")


def precision_of(node: fx.Node) -> Precision:
    """The rule that a node falls under."""
    if phase_of(node) == "update":
        return _UPDATE
    found = record_of(node).precision
    if found is not None:
        return found
    known = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")
    return _FOLLOW if known else _KEEP
