"""Which operator goes which way on a processor that has no instructions for a format: names as data.

The lists are measured: experiments/low_precision_operators. An operator in none of them runs in the mode.
"""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """Give the names in a text."""
    return frozenset(text.split())


PLAIN = words(
    """
    relu relu_ gelu silu silu_ mish elu elu_ selu celu leaky_relu leaky_relu_ relu6 hardtanh hardtanh_ hardswish
    hardsigmoid softplus softshrink hardshrink log_sigmoid glu prelu _prelu_kernel sigmoid sigmoid_ tanh tanh_
    threshold softmax log_softmax dropout dropout_ feature_dropout
    add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__ mul mul_ __mul__ __rmul__ __imul__
    div div_ __truediv__ __rtruediv__ __itruediv__ neg __neg__ abs exp log sqrt sin cos maximum minimum clamp clamp_
    clamp_min clamp_max where masked_fill masked_fill_ lerp addcmul addcdiv
    cat stack clone contiguous to float half bfloat16 type repeat roll flip tril triu pad constant_pad_nd pixel_shuffle
    zeros_like ones_like empty_like full_like zeros ones full empty new_zeros new_ones new_full new_empty tensor
    scalar_tensor arange detach
    batch_norm layer_norm
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices avg_pool1d avg_pool2d
    adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d
    mean norm linalg_vector_norm var std prod logsumexp cumsum max min topk sort gather index_select index_add scatter
    scatter_add rsqrt erf log1p expm1 instance_norm rms_norm adaptive_avg_pool1d adaptive_avg_pool2d
    upsample_bicubic2d smooth_l1_loss kl_div
    sum amax amin eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ argmax argmin item isfinite isnan
    cross_entropy_loss nll_loss mse_loss l1_loss
    """
)
"""Functions whose own low-precision kernels are not slow, and in which no matrix work hides."""

SLOW: dict[str, frozenset[str]] = {
    "pow": words("float16"),
    "square": words("float16"),
    "group_norm": words("float16"),
    "im2col": words("float16"),
    "huber_loss": words("bfloat16"),
    "grid_sampler": words("bfloat16"),
}
"""Functions without matrix work that take over 1.5 times as long as in float32, and the formats in which they do."""

ACCUMULATED = words(
    """
    mm addmm bmm baddbmm addbmm mv addmv dot vdot addr _trilinear _addmm_activation
    convolution convolution_backward _cdist_forward _cdist_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    embedding_dense_backward _embedding_bag_backward
    """
)
"""PyTorch's internal operators that the mode computes in float32: matrix work, and sums of many rows."""

FLOAT32_RESULTS = {"_scaled_dot_product_flash_attention_for_cpu": (1,)}
"""Results that PyTorch itself keeps in float32, by position: attention's log-sum-exp."""

FLOAT32_OPERANDS = {"_scaled_dot_product_flash_attention_for_cpu_backward": (5,)}
"""Operands that PyTorch itself keeps in float32, by position: the same."""
