"""How much memory the tensors of a step take."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Count the bytes of all storages alive while active, each once, from the operators that make them.

    PyTorch's CPU allocator keeps no count. `peak_bytes` is the largest sum; a storage counts from the operator that
    made it until it is freed. Tensors that exist before are counted when given to `hold`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile trace under this mode: else a measured step would run uncompiled, and all after it."""
        return True

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are alive already: weights, gradients, optimizer state, the batch."""
        for tensor in tensors:
            self._add(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator and count what it made."""
        with torch._C.DisableTorchFunction():  # a function mode of the caller has seen this already
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _add(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            if tensor.is_sparse:
                self._add(tensor._indices())
                self._add(tensor._values())
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live_bytes += self._sizes[key]
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)


def tensors_of(*objects: Any) -> list[Tensor]:
    """Give the tensors in nested containers, optimizer state included."""
    return [leaf for leaf in tree_leaves(list(objects)) if isinstance(leaf, Tensor)]


def process_peak_bytes() -> int:
    """Give the largest resident size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


