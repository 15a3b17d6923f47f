"""A network under a level meets torch.compile: it is refused, and what stays allowed really compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from ampexp.amp import auto_mixed_precision, build_train_network, custom_mixed_precision
from ampexp.amp.unseen import refuse_unseen
from tests.amp.kit import sgd
from tests.amp.low import LOW_LEVELS

# Dynamo warns of its own doings, such as of the gradients of tensors that it asks for them.
pytestmark = pytest.mark.filterwarnings("ignore")

_slow = pytest.mark.slow  # the same laws at every level
LOW = [
    pytest.param({"level": "O2"}, id="O2"),
    *[pytest.param({"level": x}, id=x, marks=_slow) for x in LOW_LEVELS if x != "O2"],
    *[
        pytest.param({"cast_model_type": dtype}, id=str(dtype), marks=_slow)
        for dtype in (torch.float16, torch.bfloat16)
    ],
]
UNCAST = [
    pytest.param({"level": "O0"}, id="O0"),
    pytest.param({"level": "O2", "cast_model_type": torch.float32}, id="float32", marks=_slow),
]
GRAPHS: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    GRAPHS.clear()
    yield
    torch._dynamo.reset()


def counted(graph: Any, inputs: Any) -> Any:
    """Compile nothing further, but remember what dynamo traced."""
    GRAPHS.append(graph)
    return graph.forward


def counted_whole(graph: Any, inputs: Any) -> Any:
    """Remember forward and backward, each traced down to the operators below autograd."""
    return aot_autograd(fw_compiler=counted, bw_compiler=counted)(graph, inputs)


compiled = functools.partial(torch.compile, backend=counted)


def mixed(x: Tensor) -> Tensor:
    return (x @ x.t()).tanh() @ x


mixed_here = compiled(mixed)
mixed_whole = compiled(mixed, fullgraph=True)


class Part(nn.Module):
    """Operators of every kind of precision, in Python that dynamo can trace."""

    def __init__(self, function: Any = mixed) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.call = function

    def forward(self, x: Tensor) -> Tensor:
        call = self.call
        while isinstance(call, (list, dict)):  # dynamo cannot read `list | dict`
            call = call[0]
        return call(self.linear(x))


class Decorated(Part):
    @torch.compile(backend=counted)
    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.linear(x))


class Here(Part):
    """A forward that calls a compiled function by name; nothing of the module tells."""

    def forward(self, x: Tensor) -> Tensor:
        return mixed_here(self.linear(x))


class HereWhole(Part):
    def forward(self, x: Tensor) -> Tensor:
        return mixed_whole(self.linear(x))


class Method(Part):
    @torch.compile(backend=counted)
    def mix(self, x: Tensor) -> Tensor:
        return mixed(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.linear(x))


class Branch(Part):
    """PyTorch's own control flow: it compiles even where its user does not."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.cond(y.sum() > -1e9, lambda y: mixed(y), lambda y: y + 1, (y,))


def in_place(part: nn.Module, **options: Any) -> nn.Module:
    part.compile(backend=counted, **options)
    return part


def network_of(part: nn.Module) -> nn.Module:
    """Hold a part as a network does, with the same weights for each part."""
    generator = torch.Generator().manual_seed(3)
    network = nn.Sequential(nn.Identity(), part)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return network


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(4)), torch.arange(5) % 3


def built(network: nn.Module, loss_fn: Any = F.cross_entropy, **words: Any) -> Any:
    return build_train_network(network, sgd(network), loss_fn, loss_scale_manager=None, **words)


def trained(train_network: Callable[..., Any], network: nn.Module) -> list[Tensor]:
    losses = [train_network(*batch()).loss for _ in range(2)]
    return [*losses, *(parameter.detach().clone() for parameter in network.parameters())]


def plainly_trained(loss_fn: Any = F.cross_entropy, **words: Any) -> list[Tensor]:
    network = network_of(Part())
    return trained(built(network, loss_fn, **words), network)


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_one_line(error: BaseException) -> None:
    assert "\n" not in str(error)
    assert "O0" in str(error)


SEEN_AT_BUILD: dict[str, Callable[[], nn.Module]] = {
    "a compiled module": lambda: compiled(Part()),
    "a module compiled whole": lambda: compiled(Part(), fullgraph=True),
    "a module compiled in place": lambda: in_place(Part()),
    "a decorated forward": Decorated,
    "a forward compiled alone": lambda: with_forward(Part()),
    "a function": lambda: Part(compiled(mixed)),
    "a function with arguments": lambda: Part(functools.partial(compiled(mixed))),
    "a function in a list": lambda: Part([compiled(mixed)]),
    "a function in a dict": lambda: Part({0: compiled(mixed)}),
    "a function deeper": lambda: Part([{0: [compiled(mixed)]}]),
}


def with_forward(part: nn.Module) -> nn.Module:
    part.forward = compiled(part.forward)  # type: ignore[method-assign]
    return part


def with_network(train_network: Any, network: nn.Module) -> Any:
    train_network.network = network
    return train_network


def with_part(train_network: Any, part: nn.Module) -> Any:
    train_network.network.network[1] = part
    return train_network


def with_part_in_place(train_network: Any, **options: Any) -> Any:
    in_place(train_network.network.network[1], **options)
    return train_network


def with_network_in_place(train_network: Any) -> Any:
    in_place(train_network.network)
    return train_network


SEEN_AT_CALL: dict[str, tuple[type[Part], Callable[[Any], Any]]] = {
    "a function that forward calls": (Here, lambda step: step),
    "a method that forward calls": (Method, lambda step: step),
    "a function compiled whole": (HereWhole, lambda step: step),
    "a part after the build": (Part, lambda step: with_part(step, compiled(step.network.network[1]))),
    "a part in place": (Part, with_part_in_place),
    "a part in place and whole": (Part, lambda step: with_part_in_place(step, fullgraph=True)),
    "the network under its level": (Part, lambda step: with_network(step, compiled(step.network))),
    "that network in place": (Part, with_network_in_place),
    "the step": (Part, compiled),
    "the step in place": (Part, in_place),
    "a function around the step": (Part, lambda step: compiled(lambda *inputs: step(*inputs))),
}  # fmt: skip


@pytest.mark.parametrize("words", LOW)
@pytest.mark.parametrize("way", SEEN_AT_BUILD)
def test_compiled_parts_are_refused_at_build(way: str, words: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"^network\.1 \(.*torch\.compile.*operators cannot be seen"
    ) as caught:
        built(network_of(SEEN_AT_BUILD[way]()), **words)
    assert_one_line(caught.value)


@pytest.mark.parametrize("words", LOW)
@pytest.mark.parametrize("way", SEEN_AT_CALL)
def test_compiled_calls_are_refused(way: str, words: dict[str, Any]) -> None:
    """The refusal comes before a weight moves, and leaves the level switched off."""
    part, compile_it = SEEN_AT_CALL[way]
    network = network_of(part())
    before = [parameter.detach().clone() for parameter in network.parameters()]
    step = compile_it(built(network, **words))
    for _ in range(2):  # what dynamo keeps of the first call helps no second one
        with pytest.raises(RuntimeError, match=r"^(train_)?network.*: torch\.compile") as caught:
            step(*batch())
        assert type(caught.value) is RuntimeError
        assert_one_line(caught.value)
    assert_same(before, list(network.parameters()))
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not GRAPHS


@pytest.mark.parametrize("words", UNCAST)
@pytest.mark.parametrize("way", [*SEEN_AT_BUILD, *SEEN_AT_CALL])
def test_without_a_level_all_of_it_really_compiles(way: str, words: dict[str, Any]) -> None:
    if way in SEEN_AT_BUILD:
        network = network_of(SEEN_AT_BUILD[way]())
        step = built(network, **words)
    else:
        part, compile_it = SEEN_AT_CALL[way]
        network = network_of(part())
        step = compile_it(built(network, **words))
    assert_same(trained(step, network), plainly_trained(**words))
    assert GRAPHS


@pytest.mark.parametrize("words", [*UNCAST, *LOW])
def test_a_compiled_loss_really_compiles(words: dict[str, Any]) -> None:
    expected = plainly_trained(**words)
    for loss_fn in (compiled(F.cross_entropy, fullgraph=True), compiled(nn.CrossEntropyLoss())):
        torch._dynamo.reset()
        GRAPHS.clear()
        assert_same(plainly_trained(loss_fn, **words), expected)
        assert len(GRAPHS) == 1
        assert not any("half" in str(node) for node in GRAPHS[0].graph.nodes)


@pytest.mark.parametrize("words", [*UNCAST, *LOW])
def test_the_backward_of_a_compiled_loss_compiles_too(words: dict[str, Any]) -> None:
    loss_fn = torch.compile(F.cross_entropy, backend=counted_whole, fullgraph=True)
    assert_same(plainly_trained(loss_fn, **words), plainly_trained(**words))
    forward, backward = GRAPHS
    assert "_log_softmax.default" in forward.code
    assert "_log_softmax_backward_data.default" in backward.code or "exp.default" in backward.code


@pytest.mark.parametrize("words", LOW)
def test_a_call_that_compiled_before_is_no_way_round(words: dict[str, Any]) -> None:
    """What was compiled outside of the level, even as often as dynamo allows, is not run inside."""
    step = built(network_of(Here()), **words)
    for width in range(1, 12):
        mixed_here(torch.ones(width, width + 1))
    mixed_here(torch.ones(5, 3))
    assert GRAPHS
    with pytest.raises(RuntimeError, match=r"^network\.1 \(Here\): torch\.compile"):
        step(*batch())


@pytest.mark.parametrize("words", LOW)
def test_control_flow_that_compiles_by_itself_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"^network: torch\.compile.*torch\.cond") as caught:
        built(network_of(Branch()), **words)(*batch())
    assert_one_line(caught.value)


def test_networks_under_a_level_are_refused_outside_of_a_step() -> None:
    make = {
        "level": lambda network: auto_mixed_precision(network, "O2"),
        "list": lambda network: custom_mixed_precision(network, white_list=[nn.Linear]),
    }
    inputs, _ = batch()
    for under in make.values():
        with pytest.raises(ValueError, match=r"^network\.1 .*compiled by torch\.compile"):
            under(network_of(in_place(Part())))
        for network in (compiled(under(network_of(Part()))), in_place(under(network_of(Part())))):
            with pytest.raises(RuntimeError, match=r"^network: torch\.compile") as caught:
                network(inputs)
            assert_one_line(caught.value)
            step = build_train_network(network, sgd(network), F.cross_entropy)
            with pytest.raises(RuntimeError, match=r"^network: torch\.compile"):
                step(*batch())
    assert not GRAPHS


@pytest.mark.parametrize("words", LOW)
def test_what_is_told_not_to_compile_trains_as_ever(words: dict[str, Any]) -> None:
    expected = plainly_trained(**words)
    network = network_of(torch.compiler.disable(Part()))
    assert_same(trained(built(network, **words), network), expected)
    network = network_of(Part(torch.compiler.disable(mixed)))
    step = torch.compiler.disable(built(network, **words))
    assert_same(trained(compiled(lambda *inputs: step(*inputs)), network), expected)
    network = network_of(Here())
    with torch.compiler.set_stance("force_eager"):
        assert_same(trained(built(network, **words), network), expected)
    assert not GRAPHS


def test_networks_that_compile_nothing_are_taken() -> None:
    """An attribute that answers to every name is no compiled function."""

    class Answers:
        def __getattr__(self, name: str) -> Any:
            return self

    part = Part()
    endless: list[Any] = [Answers()]
    endless.append(endless)
    part.more = endless
    refuse_unseen(network_of(part))
