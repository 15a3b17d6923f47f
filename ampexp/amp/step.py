"""One optimisation step: forward, scaled backward, unscaling, the decision to skip, the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampexp.amp.batch import first_floating, to_float32
from ampexp.amp.loss_scale import LossScale
from ampexp.amp.network import PrecisionNetwork, in_backward, precision_networks
from ampexp.amp.scalers import all_finite
from ampexp.amp.unseen import refuse_compiled
from ampexp.boost.base import Boost, Update

MAX_OVERFLOWS_IN_A_ROW = 1000
SavedBuffer = tuple[nn.Module, str, Tensor | None, Tensor | None]
"""Where a buffer belongs, the buffer itself and a copy of its numbers; None twice for one that is not there yet."""


class StepOutput(NamedTuple):
    """What one step says: tensors on the network's device, each a scalar.

    `loss`: the unscaled loss, float32. `overflow`: whether the loss or a gradient was not finite (False without a loss
    scale: nothing is checked then). `loss_scale`: the factor that this step used, float32.
    """

    loss: Tensor
    overflow: Tensor
    loss_scale: Tensor


class TrainNetwork(nn.Module):
    """A network, its loss and its optimizer: one call is one optimisation step. Made by `build_train_network`.

    Attributes:
        network: the network under its level, for evaluation: floating outputs in float32.
        record: what was built, in words: resolved level, cast type, BatchNorm rule, loss scale, boosts and effect.
        num_steps, num_skipped_steps: calls, and those whose update was skipped.
        grad_norm: the norm of the unscaled gradients before clipping, when clipping is on.

    """

    def __init__(
        self,
        network: PrecisionNetwork,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any] | None,
        loss_scale: LossScale,
        boosts: Sequence[Boost],
        record: dict[str, str],
        scheduler: Any = None,
        clip_norm: float | None = None,
    ) -> None:
        """Hold the parts; `build_train_network` checks them."""
        super().__init__()
        self.network = network
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loss_scale = loss_scale
        self.boosts = list(boosts)
        self.record = record
        self.clip_norm = clip_norm
        self.grad_norm: Tensor | None = None
        self.num_steps = 0
        self.num_skipped_steps = 0
        self.num_overflows_in_a_row = 0
        # walked once: a walk over a small network's modules costs a per cent of its step
        self._parameters_cleared = list(self.parameters())
        self._parts = precision_networks(network) if network.policy is None else []

    def forward(self, *inputs: Any, **kwargs: Any) -> StepOutput:
        """Train one step.

        The last positional argument goes to the loss function, the others and the keywords to the network; without a
        loss function all go to the network, which returns the loss. Containers are not unpacked.

        Raises:
            TypeError: the loss is not one floating scalar (or a tuple or dict whose first item or `loss` is).
            RuntimeError: the 1,001st overflow in a row, or an operator that cannot compute in the level's dtype.

        """
        if self.network.policy is not None:
            refuse_compiled(self.network)
        scale = self.loss_scale
        saved = self._saved_buffers() if scale.skips else []
        self._clear_gradients()
        with self._selected():
            loss = self._backward(inputs, kwargs, scale.value)
        self.num_steps += 1
        overflow = (
            self._unscale(loss, scale) if scale.checks else torch.zeros_like(loss, dtype=torch.bool)
        )
        factor = torch.full_like(loss, scale.value)
        if scale.skips and self._adjusted(overflow, scale):
            _restore(saved)
            self._refuse_endless_overflow()
        else:
            self._update()
        return StepOutput(loss, overflow, factor)

    def _backward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], scale: float) -> Tensor:
        """Compute the scaled gradients and give the loss."""
        if self.loss_fn is not None and not inputs:
            raise TypeError(
                "train_network(*inputs, label) needs the label for loss_fn as last positional argument; got none"
            )
        with self.network.scope() as mode:
            network_inputs = inputs if self.loss_fn is None else inputs[:-1]
            if mode is None:
                output = self.network(*network_inputs, **kwargs)
            else:
                output = self.network.run(mode, network_inputs, kwargs)
            if self.loss_fn is not None:
                output = self.loss_fn(output, self._label(inputs[-1], output))
            loss = loss_of(output)
            if not loss.requires_grad:
                raise TypeError(
                    "the loss must depend on a parameter that trains; got a loss without a gradient"
                )
            factor = torch.full_like(loss, scale)
            with self._backward_scope(mode):
                torch.autograd.backward(loss, factor)
        return loss.detach().float()

    def _selected(self) -> AbstractContextManager[Any]:
        """Let the boosts choose what takes part in this step."""
        if not self.boosts:
            return nullcontext()
        return entered(boost.select(self.num_steps) for boost in self.boosts)

    def _backward_scope(self, mode: Any) -> AbstractContextManager[Any]:
        if mode is not None:
            return in_backward(mode)
        if not self._parts:
            return nullcontext()
        return entered(part.backward_scope() for part in self._parts)

    def _label(self, label: Any, output: Any) -> Any:
        """Give floating labels in float32; a network that computes in float64 at O0 keeps its labels."""
        if self.network.policy is None:
            found = first_floating(output)
            if found is not None and found.dtype is torch.float64:
                return label
        return to_float32(label)

    def _clear_gradients(self) -> None:
        for parameter in self._parameters_cleared:
            parameter.grad = None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _gradients(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return [
            parameter.grad
            for group in groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    @torch.no_grad()
    def _unscale(self, loss: Tensor, scale: LossScale) -> Tensor:
        """Divide the gradients by the scale in float32 and say whether anything was not finite."""
        dense, others = list[Tensor](), [loss]
        for gradient in self._gradients():
            ordinary = gradient.dtype is torch.float32 and gradient.layout is torch.strided
            (dense if ordinary and gradient.device == loss.device else others).append(gradient)
        for gradient in others[1:]:
            gradient.div_(scale.value)
        overflow = all_finite(others).logical_not()
        if not dense:
            return overflow
        # one pass in C++, which multiplies: by a power of two that is the same number
        exact = math.frexp(scale.value)[0] == 0.5
        found, factor = loss.new_zeros(()), loss.new_tensor(1.0 / scale.value if exact else 1.0)
        torch._amp_foreach_non_finite_check_and_unscale_(dense, found, factor)
        if not exact:
            torch._foreach_div_(dense, scale.value)
        return overflow.logical_or(found.bool())

    def _adjusted(self, overflow: Tensor, scale: LossScale) -> bool:
        """Adjust the scale and count; say whether the step is skipped. The one synchronisation of a step."""
        overflowed = bool(overflow)
        self.loss_scale = scale.adjust(not overflowed)
        if not overflowed:
            self.num_overflows_in_a_row = 0
            return False
        self.num_skipped_steps += 1
        self.num_overflows_in_a_row += 1
        return True

    def _refuse_endless_overflow(self) -> None:
        if self.num_overflows_in_a_row > MAX_OVERFLOWS_IN_A_ROW:
            raise RuntimeError(
                f"overflow in {self.num_overflows_in_a_row:,} steps in a row, the loss scale is "
                f"{self.loss_scale.value:g}: no scale helps, so the network itself is not finite; lower the learning "
                "rate, clip the gradients or train at level O0 or O1"
            )

    def _update(self) -> None:
        """Move the weights."""
        if self.clip_norm is not None:
            parameters = [
                parameter for group in self.optimizer.param_groups for parameter in group["params"]
            ]
            self.grad_norm = nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        update: Update = self.optimizer.step
        for boost in reversed(self.boosts):
            update = boost.wrap(update, self.network.network)
        update()
        if self.scheduler is not None:
            self.scheduler.step()

    def _saved_buffers(self) -> list[SavedBuffer]:
        """Copy all buffers: BatchNorm's kernels write theirs past the version counter, so none can be left out."""
        return [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in self.modules()
            for name, buffer in module._buffers.items()
        ]


def entered(contexts: Iterable[AbstractContextManager[Any]]) -> ExitStack:
    """Enter contexts in their order, and give what leaves them all."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all()


@torch.no_grad()
def _restore(saved: list[SavedBuffer]) -> None:
    """Put buffers back as they were before a forward."""
    for module, name, buffer, copy in saved:
        module._buffers[name] = buffer
        if buffer is not None and copy is not None:
            buffer.copy_(copy)


def loss_of(output: Any) -> Tensor:
    """Give the loss in what a loss function or network returned; raises TypeError for anything but a scalar."""
    allowed = "one floating scalar, or a tuple or dict whose first item or 'loss' is one"
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss", output)
    elif isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be {allowed}; got {type(loss).__name__}")
    if loss.dim() != 0 or not loss.is_floating_point():
        raise TypeError(
            f"the loss must be {allowed}; got shape {tuple(loss.shape)} of {loss.dtype}"
        )
    return loss
