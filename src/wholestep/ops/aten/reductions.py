"""Operators that sum over elements: reductions, norms, softmax, pooling, losses,
scatters. FLOPs per element of the input.

What each number is made of stands beside it; an operation and a call of exp or sqrt count 1, as in elementwise.py.
"""

from __future__ import annotations

import sympy

from wholestep.ops.amounts import Amount, is_known, numel, product, size
from wholestep.ops.call import Call, window
from wholestep.ops.record import Formula, flops_of

# fmt: off
_ONCE = (
    "sum", "mean", "amax", "amin", "max", "min", "prod", "all", "any", "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin",
    "count_nonzero", "nansum", "logcumsumexp", "aminmax", "sum_to_size", "trace", "median", "mode", "bincount", "histc",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_avg_pool1d",
    # comparisons of a sort depend on the algorithm: one per element
    "sort", "topk", "kthvalue", "_unique2", "searchsorted", "bucketize",
)
_NORMS = (
    "native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update", "_batch_norm_with_update_functional",
)
_NORMS_BACKWARD = (
    "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward", "cudnn_batch_norm_backward",
    "batch_norm_backward",
)
PER_INPUT_ELEMENT = {
    **dict.fromkeys(_ONCE, 1),
    # the mean, then centre, square, add
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), 4),
    "linalg_vector_norm": 2, "norm": 2, "_foreach_norm": 2, "logsumexp": 4, "renorm": 3,
    # maximum, subtract, exp, add, divide (subtract for the logarithm)
    "_softmax": 5, "_log_softmax": 5, "_safe_softmax": 5,
    # y (g - sum g y);  g - exp(y) sum g
    "_softmax_backward_data": 4, "_log_softmax_backward_data": 4,
    # mean 1, centre square add 3, normalise 2, weight and bias 2; without statistics only the last two
    **dict.fromkeys(_NORMS, 8), "_native_batch_norm_legit_no_training": 4, "_batch_norm_no_update": 4,
    # normalised value again 2, g w 1, two sums 3, gradient of the input 4, of weight and bias 3
    **dict.fromkeys(_NORMS_BACKWARD, 13),
    # square add 2, normalise 1, weight 1;  backward: value 1, g w 1, sum 2, input 3, weight 2
    "_fused_rms_norm": 4, "_fused_rms_norm_backward": 9, "rms_norm": 4,
    # losses that torch keeps whole, their sum included
    "mse_loss": 3, "smooth_l1_loss": 5, "huber_loss": 5, "l1_loss": 3, "binary_cross_entropy": 6,
    "binary_cross_entropy_with_logits": 8, "kl_div": 4,
}
# fmt: on


def per_input_element(work: int) -> Formula:
    return lambda call: work * numel(call.first)


for _name, _work in PER_INPUT_ELEMENT.items():
    flops_of(f"aten::{_name}", kind="reduction")(per_input_element(_work))


@flops_of("aten::max.other", "aten::min.other", kind="elementwise")
def larger_of_two(call: Call) -> Amount:
    return numel(call.outputs[0])


@flops_of("aten::nll_loss_forward", "aten::nll_loss2d_forward", kind="reduction")
def picked_loss(call: Call) -> Amount:
    """One value per target is picked, negated and added."""
    return 2 * numel(call.tensor("target"))


@flops_of("aten::_ctc_loss", kind="reduction")
def ctc(call: Call) -> Amount:
    """Three logarithms added per time step and state: 7. States: the targets with blanks between them."""
    time, rows = call.shape("log_probs")[:2]
    return 7 * time * rows * (2 * _target_length(call) + 1)


@flops_of("aten::_ctc_loss_backward", kind="reduction")
def ctc_backward(call: Call) -> Amount:
    """The same recursion backwards, the sum of both, and one exp and subtraction per probability."""
    time, rows = call.shape("log_probs")[:2]
    return 10 * time * rows * (2 * _target_length(call) + 1) + 3 * numel(call.tensor("log_probs"))


def _target_length(call: Call) -> Amount:
    """Of the longest row; of their mean where rows are packed one after the other."""
    targets = call.shape("targets")
    return targets[1] if len(targets) == 2 else targets[0] // call.shape("log_probs")[1]


@flops_of("aten::max_pool2d_with_indices", "aten::avg_pool2d", "aten::avg_pool1d", "aten::max_pool2d", kind="reduction")
def pooling(call: Call) -> Amount:
    return numel(call.outputs[0]) * window(call, "kernel_size", 2)


@flops_of("aten::max_pool3d_with_indices", "aten::avg_pool3d", kind="reduction")
def pooling_3d(call: Call) -> Amount:
    return numel(call.outputs[0]) * window(call, "kernel_size", 3)


@flops_of("aten::avg_pool2d_backward", kind="reduction")
def mean_pooling_backward(call: Call) -> Amount:
    return numel(call.tensor("grad_output")) * window(call, "kernel_size", 2)


@flops_of(
    "aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward",
    "aten::adaptive_max_pool2d_backward",
    "aten::_adaptive_avg_pool2d_backward", "aten::embedding_dense_backward", "aten::upsample_nearest2d_backward",
    "aten::upsample_nearest1d_backward", "aten::_embedding_bag_dense_backward", "aten::_embedding_bag_backward",
    kind="reduction",
)  # fmt: skip
def spread_gradient(call: Call) -> Amount:
    """One addition per element of the gradient that comes in."""
    return numel(call.tensor("grad_output", "grad"))


@flops_of("aten::_embedding_bag", "aten::embedding_bag", "aten::_embedding_bag_forward_only", kind="reduction")
def sum_of_rows(call: Call) -> Amount:
    return numel(call.tensor("indices")) * call.shape("weight")[-1]


@flops_of("aten::scatter_add", "aten::index_add", "aten::scatter_reduce", "aten::index_reduce", kind="reduction")
def scattered_sum(call: Call) -> Amount:
    return numel(call.tensor("src", "source"))


@flops_of("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put", "aten::put", kind="reduction")
def put(call: Call) -> Amount:
    """Additions only where values accumulate; the indices are broadcast to their common shape."""
    if not call.get("accumulate", False):
        return 0
    return numel(call.tensor("values", "source"))


@flops_of("aten::_cdist_forward", "aten::_cdist_backward", kind="reduction")
def distances(call: Call) -> Amount:
    return 3 * numel(call.tensor("cdist") if "cdist" in call.arguments else call.outputs[0]) * call.shape("x1")[-1]


@flops_of("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r", kind="other")
def fourier(call: Call) -> Amount:
    """The usual 5 N log2 N of a complex transform of N points; half of it where one side is real."""
    signal = call.outputs[0] if call.name == "aten::_fft_c2r" else call.tensor("self")
    points = product(size(signal.shape[dim]) for dim in call["dim"])
    rounds = (points - 1).bit_length() if is_known(points) else sympy.ceiling(sympy.log(points, 2))
    return (5 if call.name == "aten::_fft_c2c" else sympy.Rational(5, 2)) * numel(signal) * rounds
