"""The fraction of right answers, counted."""

import math

import pytest
import torch

from ampexp.metrics import Accuracy


def count(batches):
    accuracy = Accuracy()
    for output, label in batches:
        accuracy.update(output, label)
    return accuracy.compute()["accuracy"]


@pytest.mark.parametrize("shape", [(90,), (90, 7)])
def test_accuracy_is_the_fraction_of_right_answers_however_the_batches_are_cut(shape):
    label = torch.randint(0, 5, shape)
    output = torch.randn(*shape, 5)
    expected = (output.argmax(-1) == label).double().mean().item()
    assert 0 < expected < 1
    for size in (1, 32, 90):
        assert count(zip(output.split(size), label.split(size), strict=True)) == pytest.approx(
            expected
        )


def test_reset_forgets():
    accuracy = Accuracy()
    assert math.isnan(accuracy.compute()["accuracy"])
    accuracy.update(torch.eye(3), torch.tensor([0, 1, 0]))
    assert accuracy.compute() == {"accuracy": 2 / 3}
    accuracy.reset()
    assert math.isnan(accuracy.compute()["accuracy"])


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(4, 1\)"):
        Accuracy().update(torch.zeros(4, 3), torch.zeros(4, 1))
