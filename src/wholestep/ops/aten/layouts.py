"""What torch's operators do with memory orders that they were not captured with (`passes/channels_last.py`)."""

from __future__ import annotations

from wholestep.ops.record import record

# fmt: off
record("aten::fill", "aten::_to_copy", "aten::clone", "aten::cat", layout="elements")
record("aten::log_sigmoid_forward", "aten::log_sigmoid_backward", "aten::as_strided", layout="memory")
record(
    "aten::_native_batch_norm_legit_functional", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training",
    "aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::_batch_norm_with_update_functional",
    "aten::_batch_norm_no_update", "aten::native_batch_norm_backward", "aten::cudnn_batch_norm_backward",
    "aten::batch_norm_backward", "aten::max_pool2d_with_indices",
    "aten::max_pool2d_with_indices_backward", "aten::avg_pool2d", "aten::avg_pool2d_backward", "aten::_adaptive_avg_pool2d",
    "aten::_adaptive_avg_pool2d_backward", "aten::adaptive_max_pool2d", "aten::adaptive_max_pool2d_backward",
    "aten::upsample_nearest2d", "aten::upsample_nearest2d_backward", "aten::upsample_bilinear2d",
    "aten::upsample_bilinear2d_backward", "aten::hardtanh", "aten::hardtanh_backward", "aten::leaky_relu_backward",
    "aten::elu_backward", "aten::hardswish", "aten::hardswish_backward", "aten::hardsigmoid_backward", "aten::softplus_backward",
    "aten::mish_backward", "aten::_prelu_kernel", "aten::_prelu_kernel_backward",
    layout="two",
)
record(
    "aten::constant_pad_nd", "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::slice_backward", "aten::select_backward",
    "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like", "aten::new_zeros", "aten::new_full",
    "aten::new_ones", "aten::new_empty", "aten::mean", "aten::sum", "aten::amax", "aten::any", "aten::mm", "aten::addmm",
    "aten::bmm", "aten::mse_loss", "aten::mse_loss_backward",
    layout="any",
)
# fmt: on
