"""Operators that compute each element by itself: FLOPs per element of the output.

One arithmetic operation, comparison, selection or integer instruction counts 1; so does one call of exp, log, tanh, erf, sqrt
and their like. Hardware gives those fewer units (an H100 has 16 for 128 multiply-adds), but how many differs between devices,
and such operators wait for memory anyway. Operators that torch tags `pointwise` and that are not listed here count 1.
"""

from __future__ import annotations

from wholestep.ops.amounts import Amount, numel
from wholestep.ops.call import Call, elements
from wholestep.ops.record import Formula, flops_of

RANDOM_BITS = 20
"""Integer instructions behind one random number: `ws::dropout` hashes an index with three multiplications."""

# fmt: off
PER_ELEMENT = {
    # 1 / (1 + exp(-x)); x sigmoid(x); their derivatives
    "sigmoid": 4, "sigmoid_backward": 3, "silu": 5, "silu_backward": 9, "log_sigmoid_forward": 5,
    "log_sigmoid_backward": 6,
    "tanh": 1, "tanh_backward": 3, "softplus": 5, "softplus_backward": 5, "mish": 8, "mish_backward": 14,
    # x/2 (1 + erf(x / sqrt 2)) takes 5; the tanh form 9; both are counted as the exact one
    "gelu": 5, "gelu_backward": 10, "elu": 4, "elu_backward": 4, "hardtanh": 2, "hardtanh_backward": 3,
    "hardswish": 5, "hardswish_backward": 6,
    "leaky_relu": 2, "leaky_relu_backward": 2, "glu": 5, "glu_backward": 9, "prelu": 2, "_prelu_kernel": 2,
    "_prelu_kernel_backward": 4,
    "lerp": 3, "addcmul": 3, "addcdiv": 3, "clamp": 2, "xlogy": 2, "logit": 4, "logit_backward": 4, "logaddexp": 5,
    "frac": 2,
    "mse_loss_backward": 3, "smooth_l1_loss_backward": 5, "huber_loss_backward": 5,
    "binary_cross_entropy_backward": 6,
    "native_dropout_backward": 2, "masked_fill": 1, "where": 1, "threshold_backward": 1, "polar": 4, "complex": 0,
    "upsample_bilinear2d": 9, "upsample_bilinear2d_backward": 8, "upsample_bicubic2d": 50, "upsample_linear1d": 4,
    "upsample_trilinear3d": 20,
    "grid_sampler_2d": 30, "grid_sampler_2d_backward": 60, "grid_sampler_3d": 60, "rrelu_with_noise": 2,
    "bernoulli": RANDOM_BITS + 1, "rand": RANDOM_BITS + 1, "rand_like": RANDOM_BITS + 1, "uniform": RANDOM_BITS + 2,
    "randint": RANDOM_BITS + 2,
    "randn": RANDOM_BITS + 6, "randn_like": RANDOM_BITS + 6, "normal": RANDOM_BITS + 8,
    "normal_functional": RANDOM_BITS + 8,
    "exponential": RANDOM_BITS + 3, "native_dropout": RANDOM_BITS + 3, "randperm": RANDOM_BITS,
    "randint_like": RANDOM_BITS + 2,
    "_assert_tensor_metadata": 0,
}
# fmt: on


def per_output_element(work: int) -> Formula:
    return lambda call: work * numel(call.outputs[0])


for _name, _work in PER_ELEMENT.items():
    flops_of(f"aten::{_name}", kind="elementwise")(per_output_element(_work))


@flops_of("aten::pow", kind="elementwise")
def power(call: Call) -> Amount:
    """A small whole exponent is that many multiplications less one; anything else is one call."""
    exponent = call.get("exponent")
    whole = isinstance(exponent, int | float) and exponent == int(exponent) and 2 <= exponent <= 4
    return (int(exponent) - 1 if whole else 1) * numel(call.outputs[0])


@flops_of("aten::_thnn_fused_lstm_cell", "aten::_thnn_fused_gru_cell", kind="elementwise")
def recurrent_cell(call: Call) -> Amount:
    """Gates, their activations and the new state: about 25 per unit."""
    return 25 * numel(call.outputs[0])


@flops_of("aten::_thnn_fused_lstm_cell_backward_impl", "aten::_thnn_fused_gru_cell_backward", kind="elementwise")
def recurrent_cell_backward(call: Call) -> Amount:
    return 9 * elements(call.outputs)


@flops_of("aten::nll_loss_backward", "aten::nll_loss2d_backward", kind="elementwise")
def picked_loss_backward(call: Call) -> Amount:
    """One division per target; the rest of the gradient is zeros."""
    return numel(call.tensor("target"))
