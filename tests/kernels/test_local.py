"""Low-precision work is local: to one thread, to one step, and to levels that have any."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampexp.amp import auto_mixed_precision, build_train_network
from tests.kernels.kit import Spy

LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])


def stacks() -> tuple[list[Any], list[Any]]:
    return _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()


class Net(nn.Module):
    """A composite that needs the mode, and a place to look around in forward and in backward."""

    def __init__(self, look: Any = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head, self.look = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 3), look

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        x = self.rnn(x)[0][:, -1]
        if x.requires_grad:
            x.register_hook(lambda _: self.look())
        return self.head(x)


def built(network: nn.Module, level: str, **kwargs: Any) -> Any:
    return build_train_network(
        network, torch.optim.SGD(network.parameters(), lr=0.1), nn.CrossEntropyLoss(), level,
        loss_scale_manager=None, **kwargs,
    )  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3


def half_work() -> tuple[list[tuple[str, frozenset[torch.dtype]]], list[Tensor]]:
    """Half-precision products of one's own: what PyTorch does, seen below autograd, and what comes out."""
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(shape, generator=generator).half() for shape in [(32, 2, 9, 9), (2, 2, 3, 3)])
    w.requires_grad_()
    with Spy() as spy:
        y = F.conv2d(x, w)
        (gradient,) = torch.autograd.grad(y.sum(), w)
        product = torch.mm(x.flatten(1), x.flatten(1).t())
    return spy.calls, [y.detach(), gradient, product]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_another_thread_computes_as_pytorch_does(level: str) -> None:
    """While a step is inside forward, and while it is inside backward."""
    own_calls, own = half_work()
    barrier, found = threading.Barrier(2, timeout=20), []

    def work() -> None:
        for _ in ("forward", "backward"):
            barrier.wait()
            found.append((stacks(), half_work()))
            barrier.wait()

    def look() -> None:
        barrier.wait()
        barrier.wait()

    thread = threading.Thread(target=work)
    thread.start()
    built(Net(look), level)(*batch())
    thread.join()
    assert len(found) == 2
    for seen, (calls, results) in found:
        assert seen == ([], [])
        assert calls == own_calls
        assert all(torch.equal(one, other) for one, other in zip(results, own, strict=True))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_two_threads_train_as_one_does(level: str) -> None:
    barrier, results = threading.Barrier(2, timeout=20), []

    def look() -> None:
        barrier.wait()

    def train(step: Any) -> None:
        results.append([step(*batch()).loss.item() for _ in range(3)])

    train(built(Net(), level))
    steps = [built(Net(look), level) for _ in range(2)]
    threads = [threading.Thread(target=train, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert results[1:] == results[:1] * 2


class Norm(nn.BatchNorm1d):
    """A norm that says, by thread, in which dtype its operators compute."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {**getattr(self, "seen", {}), threading.current_thread().name: (x * 1.0).dtype}
        return super().forward(x)


def test_two_threads_in_one_network_keep_its_norms_in_float32() -> None:
    """Also when the one that came first has left while the other is inside."""
    started, inside, gone = threading.Event(), threading.Event(), threading.Event()
    waits = {
        "first": lambda: (started.set(), inside.wait(20)),
        "second": lambda: (inside.set(), gone.wait(20)),
    }

    class Wait(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            waits[threading.current_thread().name]()
            return x

    network = nn.Sequential(Wait(), Norm(3))
    before = {module: dict(vars(module)) for module in network.modules()}
    low = auto_mixed_precision(network, "O2")

    def first() -> None:
        low(torch.ones(4, 3))
        gone.set()

    threads = [
        threading.Thread(target=first, name="first"),
        threading.Thread(target=lambda: (started.wait(20), low(torch.ones(4, 3))), name="second"),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert network[1].seen == {"first": torch.float32, "second": torch.float32}
    for module, held in before.items():
        assert vars(module).keys() - {"seen"} == held.keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@LEVELS
def test_after_a_step_no_mode_is_left(level: str) -> None:
    step = built(Net(), level)
    step(*batch())
    assert stacks() == ([], [])
    step.network(batch()[0])
    assert stacks() == ([], [])


@pytest.mark.parametrize("where", [1, 2], ids=["forward", "backward"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_after_an_error_no_mode_is_left(level: str, where: int) -> None:
    calls = []

    def look() -> None:
        calls.append(1)
        if len(calls) == where:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        built(Net(look), level)(*batch())
    assert stacks() == ([], [])


def test_o0_runs_without_any_mode() -> None:
    seen = []
    step = built(Net(lambda: seen.append(stacks())), "O0")
    step(*batch())
    assert seen == [([], []), ([], [])]
    assert step.record["arithmetic"] == "native"


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_nothing_of_pytorch_is_replaced(level: str) -> None:
    homes = (torch, F, Tensor, nn.Module, nn.Linear, nn.GRU, torch.nn.functional, torch.autograd)
    before = [dict(vars(home)) for home in homes]
    inside = []
    built(Net(lambda: inside.append([dict(vars(home)) for home in homes])), level)(*batch())
    for found in [*inside, [dict(vars(home)) for home in homes]]:
        for one, other in zip(found, before, strict=True):
            assert all(one[name] is other[name] for name in other)
