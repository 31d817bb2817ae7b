"""Matrix products: two FLOPs per multiply-add; the bias is left out (it is one addition per output, in the same kernel).

M, K, N: rows of the left matrix, the dimension summed over, columns of the right matrix.
"""

from __future__ import annotations

from wholestep.ops.amounts import Amount, numel, product
from wholestep.ops.call import Call
from wholestep.ops.record import flops_of


@flops_of("aten::mm", "aten::_int_mm", "aten::_scaled_mm", "aten::_scaled_mm_v2", kind="matmul")
def two_matrices(call: Call) -> Amount:
    (m, k), (_, n) = call.shape("self"), call.shape("mat2")
    return 2 * m * k * n


@flops_of("aten::addmm", "aten::_addmm_activation", kind="matmul")
def two_matrices_and_a_bias(call: Call) -> Amount:
    (m, k), (_, n) = call.shape("mat1"), call.shape("mat2")
    return 2 * m * k * n


@flops_of("aten::bmm", kind="matmul")
def batches_of_matrices(call: Call) -> Amount:
    (b, m, k), (_, _, n) = call.shape("self"), call.shape("mat2")
    return 2 * b * m * k * n


@flops_of("aten::baddbmm", "aten::addbmm", kind="matmul")
def batches_of_matrices_and_a_bias(call: Call) -> Amount:
    (b, m, k), (_, _, n) = call.shape("batch1"), call.shape("batch2")
    return 2 * b * m * k * n


@flops_of("aten::mv", kind="matmul")
def matrix_and_vector(call: Call) -> Amount:
    return 2 * product(call.shape("self"))


@flops_of("aten::addmv", kind="matmul")
def matrix_and_vector_and_a_bias(call: Call) -> Amount:
    return 2 * product(call.shape("mat"))


@flops_of("aten::dot", "aten::vdot", kind="matmul")
def two_vectors(call: Call) -> Amount:
    return 2 * product(call.shape("self"))


@flops_of("aten::linear", kind="matmul")
def linear(call: Call) -> Amount:
    return 2 * numel(call.outputs[0]) * call.shape("input")[-1]


@flops_of("aten::matmul", kind="matmul")
def broadcast_matrices(call: Call) -> Amount:
    return 2 * numel(call.outputs[0]) * call.shape("self")[-1]


@flops_of("aten::_grouped_mm", "aten::_scaled_grouped_mm", kind="matmul")
def grouped_matrices(call: Call) -> Amount:
    """One matrix per group. Where one operand is cut into groups along M, N or K, the parts sum to one whole product."""
    left, right = call.shape("self"), call.shape("mat2")
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


# ---- recurrent layers as one operator: every weight matrix multiplies the vector of every time step of every row ----


def _matrices(weights: list) -> Amount:
    return sum((numel(weight) for weight in weights if weight.dim() == 2), 0)


def _time_steps(call: Call) -> Amount:
    """Rows times time steps: all but the last dimension of the input."""
    return product(call.shape("input", "data")[:-1])


@flops_of(
    "aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu", "aten::_cudnn_rnn", "aten::miopen_rnn", kind="matmul"
)
def recurrent_layers(call: Call) -> Amount:
    return 2 * _time_steps(call) * _matrices(call.tensors("params") or call.tensors("weight"))


@flops_of("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward", kind="matmul")
def recurrent_layers_backward(call: Call) -> Amount:
    return 4 * _time_steps(call) * _matrices(call.tensors("weight"))


@flops_of("aten::mkldnn_rnn_layer", kind="matmul")
def recurrent_layer_on_cpu(call: Call) -> Amount:
    return 2 * _time_steps(call) * _matrices([call.tensor("weight0"), call.tensor("weight1")])


@flops_of("aten::mkldnn_rnn_layer_backward", kind="matmul")
def recurrent_layer_on_cpu_backward(call: Call) -> Amount:
    return 4 * _time_steps(call) * _matrices([call.tensor("weight1"), call.tensor("weight2")])
