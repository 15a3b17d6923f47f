"""A call of every function that is left to PyTorch's own low-precision kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.kernels.kit import words

Call = Callable[[Any, Callable[..., Tensor]], Any]
"""Of the function and of a maker of low operands that want gradients."""

I = torch.arange(3)  # noqa: E741

ONE = words(
    """
relu gelu silu mish elu selu celu leaky_relu relu6 hardtanh hardswish hardsigmoid softplus softshrink hardshrink
log_sigmoid sigmoid tanh neg __neg__ abs exp log sqrt sin cos clone contiguous tril triu zeros_like ones_like empty_like
detach float half bfloat16 sum isfinite isnan argmax argmin mean var std prod max min sort rsqrt erf log1p expm1
linalg_vector_norm
"""
)

TWO = words(
    """
add __add__ __radd__ sub __sub__ __rsub__ mul __mul__ __rmul__ div __truediv__ __rtruediv__ maximum minimum
eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__
"""
)

IN_PLACE = words("relu_ silu_ elu_ leaky_relu_ hardtanh_ sigmoid_ tanh_")

IN_PLACE_OF_TWO = words("add_ __iadd__ sub_ __isub__ mul_ __imul__ div_ __itruediv__")

CALLS: dict[str, Call] = {
    **{name: lambda f, t: f(t(3, 4)) for name in ONE},
    **{name: lambda f, t: f(t(3, 4), t(4)) for name in TWO},
    **{name: lambda f, t: f(t(3, 4).clone()) for name in IN_PLACE},
    **{name: lambda f, t: f(t(3, 4).clone(), t(4)) for name in IN_PLACE_OF_TWO},
    "glu": lambda f, t: f(t(3, 4), -1),
    "prelu": lambda f, t: f(t(3, 4), t(4)),
    "_prelu_kernel": lambda f, t: f(t(3, 4), t(1, 4)),
    "threshold": lambda f, t: f(t(3, 4), 0.1, 0.0),
    "softmax": lambda f, t: f(t(3, 4), -1),
    "log_softmax": lambda f, t: f(t(3, 4), -1),
    "dropout": lambda f, t: f(t(3, 4), 0.5, True),
    "dropout_": lambda f, t: f(t(3, 4).clone(), 0.5, True),
    "feature_dropout": lambda f, t: f(t(3, 4), 0.5, True),
    "clamp": lambda f, t: f(t(3, 4), -1, 1),
    "clamp_": lambda f, t: f(t(3, 4).clone(), -1, 1),
    "clamp_min": lambda f, t: f(t(3, 4), 0),
    "clamp_max": lambda f, t: f(t(3, 4), 0),
    "where": lambda f, t: f(torch.tensor([True, False, True]), t(4, 3), t(3)),
    "masked_fill": lambda f, t: f(t(4, 3), torch.tensor([True, False, True]), 0.0),
    "masked_fill_": lambda f, t: f(t(4, 3).clone(), torch.tensor([True, False, True]), 0.0),
    "lerp": lambda f, t: f(t(3, 4), t(3, 4), t(3, 4)),
    "addcmul": lambda f, t: f(t(3, 4), t(3, 4), t(4)),
    "addcdiv": lambda f, t: f(t(3, 4), t(3, 4), t(4)),
    "cat": lambda f, t: f([t(3, 4), t(2, 4)]),
    "stack": lambda f, t: f([t(3, 4), t(3, 4)]),
    "to": lambda f, t: f(t(3, 4), torch.float32),
    "type": lambda f, t: f(t(3, 4), torch.float32),
    "repeat": lambda f, t: f(t(3, 4), 2, 1),
    "roll": lambda f, t: f(t(3, 4), 1),
    "flip": lambda f, t: f(t(3, 4), [0]),
    "pad": lambda f, t: f(t(3, 4), [1, 1]),
    "constant_pad_nd": lambda f, t: f(t(3, 4), [1, 1]),
    "pixel_shuffle": lambda f, t: f(t(1, 4, 2, 2), 2),
    "full_like": lambda f, t: f(t(3, 4), 2.0),
    "zeros": lambda f, t: f((3, 4)),
    "ones": lambda f, t: f((3, 4)),
    "full": lambda f, t: f((3, 4), 2.0),
    "empty": lambda f, t: f((3, 4)),
    "new_zeros": lambda f, t: f(t(3, 4), (2,)),
    "new_ones": lambda f, t: f(t(3, 4), (2,)),
    "new_full": lambda f, t: f(t(3, 4), (2,), 1.0),
    "new_empty": lambda f, t: f(t(3, 4), (2,)),
    "tensor": lambda f, t: f([1.0]),
    "scalar_tensor": lambda f, t: f(1.0),
    "arange": lambda f, t: f(3.0),
    "item": lambda f, t: f(t(1)),
    "batch_norm": lambda f, t: f(t(5, 4), t(4), t(4), None, None, True, 0.1, 1e-5, True),
    "layer_norm": lambda f, t: f(t(5, 4), [4], t(4), t(4)),
    "max_pool1d": lambda f, t: f(t(2, 3, 6), 2),
    "max_pool2d": lambda f, t: f(t(2, 3, 6, 6), 2),
    "max_pool3d": lambda f, t: f(t(2, 3, 4, 4, 4), 2),
    "max_pool1d_with_indices": lambda f, t: f(t(2, 3, 6), 2),
    "max_pool2d_with_indices": lambda f, t: f(t(2, 3, 6, 6), 2),
    "avg_pool1d": lambda f, t: f(t(2, 3, 6), 2),
    "avg_pool2d": lambda f, t: f(t(2, 3, 6, 6), 2),
    "adaptive_max_pool2d": lambda f, t: f(t(2, 3, 6, 6), [2, 2]),
    "upsample_nearest2d": lambda f, t: f(t(2, 3, 4, 4), [8, 8], None, None),
    "upsample_bilinear2d": lambda f, t: f(t(2, 3, 4, 4), [8, 8], False, None, None),
    "norm": lambda f, t: f(t(3, 4), 2),
    "logsumexp": lambda f, t: f(t(3, 4), -1),
    "cumsum": lambda f, t: f(t(3, 4), -1),
    "topk": lambda f, t: f(t(3, 4), 2),
    "gather": lambda f, t: f(t(3, 4), 0, I.view(3, 1)),
    "index_select": lambda f, t: f(t(3, 4), 0, I),
    "index_add": lambda f, t: f(t(3, 4), 0, I, t(3, 4)),
    "scatter": lambda f, t: f(t(3, 4), 0, I.view(3, 1), t(3, 1)),
    "scatter_add": lambda f, t: f(t(3, 4), 0, I.view(3, 1), t(3, 1)),
    "instance_norm": lambda f, t: f(t(2, 3, 5), t(3), t(3), None, None, True, 0.1, 1e-5, True),
    "rms_norm": lambda f, t: f(t(3, 4), [4], t(4)),
    "adaptive_avg_pool1d": lambda f, t: f(t(2, 3, 6), 2),
    "adaptive_avg_pool2d": lambda f, t: f(t(2, 3, 6, 6), [2, 2]),
    "upsample_bicubic2d": lambda f, t: f(t(2, 3, 4, 4), [8, 8], False, None, None),
    "smooth_l1_loss": lambda f, t: f(t(3, 4), t(3, 4)),
    "kl_div": lambda f, t: f(t(3, 4), t(3, 4)),
    "amax": lambda f, t: f(t(3, 4), -1),
    "amin": lambda f, t: f(t(3, 4), -1),
    "cross_entropy_loss": lambda f, t: f(t(3, 4), I, t(4).abs().detach(), 1, -100, 0.1),
    "nll_loss": lambda f, t: f(t(3, 4), I),
    "mse_loss": lambda f, t: f(t(3, 4), t(3, 4)),
    "l1_loss": lambda f, t: f(t(3, 4), t(3, 4)),
}
