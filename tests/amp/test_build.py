"""What is refused at build, by type and with a message that says where, what is allowed and what came."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from ampexp.amp import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    build_train_network,
)
from tests.amp.kit import (
    ON_CPU,
    build,
    linear,
    sgd,
)

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"level": "o2"},
        ValueError,
        r"level must be one of O0, O1, O2, O3, auto; got 'o2' (did you mean O2?)",
    ),
    ({"level": "O9"}, ValueError, "level must be one of O0, O1, O2, O3, auto; got 'O9'"),
    ({"level": 2}, TypeError, "level must be one of O0, O1, O2, O3, auto; got 2"),
    ({"level": None}, TypeError, "level must be one of O0, O1, O2, O3, auto; got None"),
    ({"boost_level": "O3"}, ValueError, "boost_level must be one of O0, O1, O2; got 'O3'"),
    ({"boost_level": 1}, ValueError, "boost_level must be one of O0, O1, O2; got 1"),
    ({"boost_level": None}, ValueError, "boost_level must be one of O0, O1, O2; got None"),
    ({"keep_batchnorm": True}, ValueError, "keep_batchnorm_fp32?)"),
    ({"boost_level": ["O1"]}, ValueError, "boost_level must be one of O0, O1, O2; got ['O1']"),
    ({"cast_model_type": "float16"}, TypeError, "cast_model_type must be one of torch.float16"),
    ({"cast_model_type": torch.float64}, ValueError, "got 'torch.float64'"),
    ({"keep_batchnorm_fp32": 1}, TypeError, "keep_batchnorm_fp32 must be True or False; got 1"),
    ({"loss_scale_manager": DynamicLossScaleManager}, TypeError, "an instance"),
    ({"loss_scale_manager": 0}, TypeError, "loss_scale_manager must be a LossScaleManager"),
    ({"loss_scale_manager": 128.0}, TypeError, "got 128.0"),
    (
        {"level": "O2", "cpu_loss_scaling": "yes"},
        TypeError,
        "cpu_loss_scaling must be True or False",
    ),
    ({"cpu_loss_scaling": None}, TypeError, "cpu_loss_scaling must be True or False; got None"),
    ({"scheduler": "cosine"}, TypeError, "scheduler must be a learning-rate scheduler"),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), REFUSED)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)) as caught:
        build(**arguments)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_scheduler_that_needs_a_metric_is_refused() -> None:
    network = linear()
    optimizer = sgd(network)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau\.step needs metrics"):
        build_train_network(network, optimizer, scheduler=plateau)


def test_wrong_network_and_loss() -> None:
    network = linear()
    with pytest.raises(TypeError, match=r"network must be a torch\.nn\.Module; got 'net'"):
        build_train_network("net", sgd(network))
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        build_train_network(network, sgd(network), "mse")


def test_wrong_optimizers() -> None:
    network = linear()
    lbfgs = torch.optim.LBFGS(network.parameters())
    with pytest.raises(ValueError, match="without a closure; got LBFGS"):
        build_train_network(network, lbfgs)
    for wrong in ([sgd(network)], torch.optim.SGD, None):
        with pytest.raises(TypeError, match=r"optimizer must be one torch\.optim\.Optimizer"):
            build_train_network(network, wrong)
    network.requires_grad_(False)
    with pytest.raises(ValueError, match="at least one parameter that requires a gradient"):
        build_train_network(network, sgd(network))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_low_storage_is_refused_by_name(level: str) -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).half())
    with pytest.raises(ValueError, match=r"network\.1\.weight must be stored in float32"):
        build(network, level=level, loss_scale_manager=None)


NEEDS_OPT_IN = {
    "default of O2": {"level": "O2"},
    "dynamic": {"loss_scale_manager": DynamicLossScaleManager()},
    "fixed drop": {"level": "O1", "loss_scale_manager": FixedLossScaleManager()},
}


@pytest.mark.parametrize("name", NEEDS_OPT_IN)
def test_cpu_needs_the_opt_in(name: str) -> None:
    arguments = NEEDS_OPT_IN[name]
    with pytest.raises(ValueError, match="on device CPU") as caught:
        build(**arguments)
    for way_out in ("None", "drop_overflow_update=False", "another level", "cpu_loss_scaling=True"):
        assert way_out in str(caught.value)
    train_network = build(**arguments, **ON_CPU)
    assert train_network.record["loss_scale_manager"] != "none"
    assert train_network.loss_scale.skips
