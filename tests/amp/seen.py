"""What operators of PyTorch receive, seen below autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CASTS = {"_to_copy", "copy_", "clone", "detach", "alias", "lift_fresh"}
SHAPES = {
    "t", "transpose", "view", "_unsafe_view", "expand", "permute", "slice", "select", "squeeze", "unsqueeze",
    "as_strided", "reshape", "unbind", "split", "split_with_sizes", "chunk",
}  # fmt: skip


class Operands(TorchDispatchMode):
    """Record for each operator below autograd the floating dtypes of its operands; casts and views are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, frozenset[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        with torch._C.DisableTorchFunction():
            floating = frozenset(
                leaf.dtype
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and leaf.is_floating_point()
            )
            if floating and name not in CASTS | SHAPES:
                self.calls.append((name, floating))
            return func(*args, **(kwargs or {}))

    def of(self, *names: str) -> set[torch.dtype]:
        """Give the dtypes that the named operators received; without a name, all operators."""
        return {dtype for name, seen in self.calls if not names or name in names for dtype in seen}
