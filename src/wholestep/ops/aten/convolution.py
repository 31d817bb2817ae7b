"""Convolutions: every weight meets every place of the output once (of the input, when transposed), for every image.

Channels within groups are already in the shape of the weight (C_out, C_in / groups, ...), so groups need no term of their own.
Padding counts as if it were data; the bias is left out.
"""

from __future__ import annotations

from wholestep.ops.amounts import Amount, product, shape
from wholestep.ops.call import Call
from wholestep.ops.record import flops_of


def convolved(
    image: tuple[Amount, ...], result: tuple[Amount, ...], weight: tuple[Amount, ...], transposed: bool
) -> Amount:
    places = (image if transposed else result)[2:]
    return 2 * image[0] * product(places) * product(weight)


@flops_of(
    "aten::convolution", "aten::_convolution", "aten::convolution_overrideable", "aten::cudnn_convolution",
    "aten::mkldnn_convolution", "aten::_slow_conv2d_forward", "aten::_conv_depthwise2d", "aten::conv_depthwise3d",
    "aten::slow_conv3d",
    kind="convolution",
)  # fmt: skip
def convolution(call: Call) -> Amount:
    out = shape(call.outputs[0])
    return convolved(call.shape("input", "self"), out, call.shape("weight"), bool(call.get("transposed", False)))


@flops_of("aten::cudnn_convolution_transpose", kind="convolution")
def transposed_convolution(call: Call) -> Amount:
    return convolved(call.shape("self"), (), call.shape("weight"), True)


@flops_of("aten::convolution_backward", "aten::convolution_backward_overrideable", kind="convolution")
def convolution_backward(call: Call) -> Amount:
    """The gradients of image and weight each cost what the forward did, where they are asked for."""
    forward = convolved(call.shape("input"), call.shape("grad_output"), call.shape("weight"), bool(call["transposed"]))
    return forward * sum(bool(wanted) for wanted in call["output_mask"][:2])
