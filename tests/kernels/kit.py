"""What the laws of low-precision work share: operands in odd layouts, comparison of bits, a spy below autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ampexp.kernels.accumulate import Accumulation
from ampexp.kernels.formats import LOW_DTYPES
from ampexp.kernels.table import ACCUMULATED

LAYOUTS = ("dense", "transposed", "sliced", "expanded", "offset", "channels_last")
VALUES = ("ordinary", "large", "tiny", "special")


def words(text: str) -> list[str]:
    return text.split()


def filled(shape: Sequence[int], dtype: torch.dtype, values: str, generator: Any) -> Tensor:
    """Draw numbers: ordinary, near the largest, among the subnormals, or with infinities and NaN among them."""
    drawn = torch.randn(tuple(shape), generator=generator)
    info = torch.finfo(dtype)
    if values == "large":
        drawn = drawn * (info.max / 8 if dtype is torch.float16 else 1e18)
    if values == "tiny":
        drawn = drawn * info.smallest_normal**0.5
    if values == "special" and drawn.numel():
        flat = drawn.view(-1)
        for value in (float("inf"), float("nan"), 0.0, -0.0, info.max, info.smallest_normal / 4):
            flat[int(torch.randint(len(flat), (), generator=generator))] = value
    return drawn.clamp(-info.max, info.max).to(dtype) if values != "special" else drawn.to(dtype)


def laid(tensor: Tensor, layout: str) -> Tensor:
    """Give the same numbers in another layout (all rows the first one where it is expanded)."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if layout == "sliced" and tensor.dim():
        return torch.stack([tensor, torch.full_like(tensor, 7.0)], -1)[..., 0]
    if layout == "expanded" and tensor.dim() and tensor.shape[0]:
        return tensor[:1].expand_as(tensor)
    if layout == "offset":
        return torch.cat([tensor.new_ones(3), tensor.reshape(-1)])[3:].view(tensor.shape)
    if layout == "channels_last" and tensor.dim() in (4, 5):
        kinds = {4: torch.channels_last, 5: torch.channels_last_3d}
        return tensor.contiguous(memory_format=kinds[tensor.dim()])
    return tensor


def assert_same_bits(mine: Tensor, exact: Tensor, what: str = "") -> None:
    """Compare numbers bit by bit, the signs of zeros too; any NaN equals any other."""
    assert mine.dtype is exact.dtype, what
    assert mine.shape == exact.shape, what
    both_nan = mine.isnan() & exact.isnan()
    bits = torch.int16 if mine.dtype.itemsize == 2 else torch.int32
    same = both_nan | (mine.contiguous().view(bits) == exact.contiguous().view(bits))
    assert same.all(), f"{what}: {mine[~same][:5].tolist()} for {exact[~same][:5].tolist()}"


def low_tensors(args: Any) -> list[Tensor]:
    return [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dtype in LOW_DTYPES]


def wide_copy(args: Any) -> Any:
    """Widen the low tensors of a call; each stays a leaf that wants a gradient or not."""
    return tree_map(
        lambda x: (
            x.detach().float().requires_grad_(x.requires_grad)
            if isinstance(x, Tensor) and x.dtype in LOW_DTYPES
            else x
        ),
        args,
    )


def called(name: str, func: Callable[..., Any], args: Any, kwargs: Any = None) -> Tensor:
    """Call an operator as a network under a level does."""
    return Accumulation().call(name, func, args, kwargs or {})


def assert_exact(
    name: str,
    func: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    gradient_layout: str = "dense",
    reads_its_output: bool = False,
) -> None:
    """The law: the float32 operator on the rounded operands, rounded once; the same for every gradient."""
    kwargs = kwargs or {}
    dtype = low_tensors((args, kwargs))[0].dtype
    wide_args, wide_kwargs = wide_copy((args, kwargs))
    accumulation = Accumulation()
    result = accumulation.call(name, func, args, kwargs)
    expected = func(*wide_args, **wide_kwargs)
    assert_same_bits(result.detach(), expected.detach().to(dtype), "result")
    low = [x for x in low_tensors((args, kwargs)) if x.requires_grad]
    wide = [x for x in tree_leaves((wide_args, wide_kwargs)) if isinstance(x, Tensor)]
    wide = [x for x in wide if x.requires_grad]
    assert result.requires_grad == expected.requires_grad
    if not low:
        return
    generator = torch.Generator().manual_seed(4)
    gradient = laid(filled(expected.shape, dtype, "ordinary", generator), gradient_layout)
    if reads_its_output:
        expected.data.copy_(expected.detach().to(dtype))
    with accumulation.backward_scope():
        mine = torch.autograd.grad(result, low, gradient)
    exact = torch.autograd.grad(expected, wide, gradient.float())
    for index, (one, other) in enumerate(zip(mine, exact, strict=True)):
        assert_same_bits(one, other.to(dtype), f"gradient {index}")


class Spy(TorchDispatchMode):
    """Record the operators that reach PyTorch's kernels, with the dtypes of their floating operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, frozenset[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        seen = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        floating = frozenset(x.dtype for x in seen if x.is_floating_point())
        self.calls.append((name, floating))
        return func(*args, **(kwargs or {}))

    def names(self) -> set[str]:
        return {name for name, _ in self.calls}

    def low_products(self) -> list[tuple[str, frozenset[torch.dtype]]]:
        """Give the operators that were to be computed in float32 and got a low operand."""
        return [
            (name, dtypes)
            for name, dtypes in self.calls
            if name.rstrip("_") in ACCUMULATED and dtypes & set(LOW_DTYPES)
        ]
