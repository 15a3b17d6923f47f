"""Laws of `auto_mixed_precision` and `custom_mixed_precision`, and of building such a network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampexp.amp import (
    auto_mixed_precision,
    custom_mixed_precision,
    get_black_list,
    get_white_list,
)
from tests.amp.kit import (
    assert_equal,
    build,
    linear,
    mixed,
    trained,
)

MADE = {
    "auto O1": lambda network: auto_mixed_precision(network, "O1"),
    "auto O3": lambda network: auto_mixed_precision(network, "O3"),
    "white": lambda network: custom_mixed_precision(network, white_list=get_white_list()),
    "inside": lambda network: nn.Sequential(nn.Identity(), auto_mixed_precision(network, "O2")),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    "arguments",
    [{"level": "O1"}, {"level": "O3"}, {"level": "auto"}, {"cast_model_type": torch.float16}],
)
def test_a_network_has_one_level(name: str, arguments: dict[str, Any]) -> None:
    network = MADE[name](linear())
    with pytest.raises(ValueError, match=r"already computes in mixed precision.*level O0"):
        build(network, **arguments)
    with pytest.raises(ValueError, match="already computes in mixed precision"):
        auto_mixed_precision(network, "O1")
    with pytest.raises(ValueError, match="already computes in mixed precision"):
        custom_mixed_precision(network, black_list=[])
    output = build(network)(torch.randn(5, 4), torch.arange(5) % 3)
    assert output.loss.dtype == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_auto_mixed_precision_built_at_o0_is_that_level(level: str) -> None:
    network, other = mixed(), mixed()
    assert_equal(
        trained(auto_mixed_precision(network, level))[:3],
        trained(other, level=level, loss_scale_manager=None)[:3],
    )
    assert_equal(list(network.state_dict().values()), list(other.state_dict().values()))


def test_custom_lists_are_the_levels() -> None:
    for made, level in (
        (custom_mixed_precision(mixed(), white_list=get_white_list()), "O1"),
        (custom_mixed_precision(mixed(), black_list=get_black_list()), "O2"),
    ):
        assert_equal(trained(made), trained(mixed(), level=level, loss_scale_manager=None))


def test_the_lists_are_copies() -> None:
    get_white_list().clear()
    get_black_list().clear()
    assert {nn.Linear, nn.ReLU, torch.matmul, torch.bmm, torch.ger} <= set(get_white_list())
    assert get_black_list() == [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm]


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.inside = (x.tanh().dtype, (self.weight * 1).dtype)
        return x.tanh() * self.weight


def test_own_modules_in_a_list() -> None:
    half, wide = torch.float16, torch.float32
    x = torch.randn(5, 4)
    network = nn.Sequential(nn.Linear(4, 4), Mine())
    output = custom_mixed_precision(network, white_list=[Mine])(x)
    assert network[1].inside == (half, half)
    assert torch.equal(output, (network[0](x).half().tanh() * network[1].weight.half()).float())
    custom_mixed_precision(network, black_list=[Mine])(x)
    assert network[1].inside == (wide, wide)
    custom_mixed_precision(network, black_list=[])(x)
    assert network[1].inside == (half, half)
    low = custom_mixed_precision(network, white_list=[torch.tanh], dtype=torch.bfloat16)(x)
    expected = network[0](x).bfloat16().tanh().float() * network[1].weight
    assert torch.equal(low, expected)


@pytest.mark.parametrize("lists", [{}, {"white_list": [nn.Linear], "black_list": []}])
def test_custom_needs_one_list(lists: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either white_list or black_list; got (both|neither)"):
        custom_mixed_precision(linear(), **lists)


@pytest.mark.parametrize(
    "wrong", [nn.Linear, (nn.Linear,), ["Linear"], [int], [nn.Linear(1, 1), 3], "x"]
)
@pytest.mark.parametrize("which", ["white_list", "black_list"])
def test_custom_lists_of_wrong_kind(which: str, wrong: Any) -> None:
    with pytest.raises(
        TypeError, match=f"{which} must be a list of nn.Module classes or functions"
    ):
        custom_mixed_precision(linear(), **{which: wrong})


def test_mixed_precision_dtypes() -> None:
    for make in (
        lambda dtype: auto_mixed_precision(linear(), "O2", dtype),
        lambda dtype: custom_mixed_precision(linear(), black_list=[], dtype=dtype),
    ):
        with pytest.raises(TypeError, match="dtype must be torch.float16 or torch.bfloat16"):
            make("float16")
        with pytest.raises(ValueError, match="dtype must be torch.float16 or torch.bfloat16"):
            make(torch.float32)
        make(torch.bfloat16)
    with pytest.raises(ValueError, match="amp_level must be one of"):
        auto_mixed_precision(linear(), "o3")
    with pytest.raises(TypeError, match="amp_level must be one of"):
        auto_mixed_precision(linear(), 3)
