"""Laws of the held part."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from ampexp.data import Tensors, hold_out
from ampexp.messages import UserError


class Mine(Dataset):
    """A user's map-style data set."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.tensor([float(index)]), self.labels[index]


def numbered(labels):
    return Tensors(torch.arange(len(labels)), torch.tensor(labels))


def order(dataset):
    return [int(dataset[index][0]) for index in range(len(dataset))]


@settings(deadline=None)  # a busy machine is no fault
@given(
    st.lists(st.integers(0, 4), min_size=20, max_size=200),
    st.sampled_from([0.1, 0.2, 0.35, 0.5]),
    st.integers(),
)
def test_every_label_keeps_its_share_whatever_the_seed(labels, fraction, seed):
    torch.manual_seed(seed % 2**32)
    rest, held = hold_out(numbered(labels), fraction)
    assert sorted(order(rest) + order(held)) == list(range(len(labels)))
    assert order(rest) == sorted(order(rest))
    assert len(held) == max(1, round(fraction * len(labels)))
    for label in set(labels):
        assert (
            abs((held.labels == label).sum().item() - len(held) / len(labels) * labels.count(label))
            <= 1
        )
    torch.manual_seed(0)
    assert order(hold_out(numbered(labels), fraction)[1]) == order(held)


@pytest.mark.parametrize(
    "convert", [int, torch.tensor, lambda value: torch.tensor(value).numpy()[()]]
)
def test_a_users_data_set_is_held_by_its_integer_labels(convert):
    labels = [0] * 60 + [1] * 30 + [2] * 10
    rest, held = hold_out(Mine([convert(label) for label in labels]), 0.1)
    assert sorted(order(rest) + order(held)) == list(range(100))
    assert torch.tensor([int(held[index][1]) for index in range(10)]).bincount().tolist() == [
        6,
        3,
        1,
    ]
    assert order(held) == order(hold_out(numbered(labels), 0.1)[1])


@pytest.mark.parametrize("label", [0.5, torch.zeros(3), "cat"])
def test_without_integer_labels_a_fixed_permutation_decides(label):
    rest, held = hold_out(Mine([label] * 50), 0.2)
    assert sorted(order(rest) + order(held)) == list(range(50))
    assert len(held) == 10
    assert order(held) not in (list(range(10)), list(range(40, 50)))
    assert order(held) == order(hold_out(Mine([label] * 50), 0.2)[1])


def test_text_is_held_from_its_end():
    rest, held = hold_out(numbered([0, 1] * 10), 0.25, stratified=False)
    assert (order(rest), order(held)) == (list(range(15)), list(range(15, 20)))


def test_nothing_is_held_at_zero():
    dataset = numbered([0, 1])
    assert hold_out(dataset, 0) == (dataset, None)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(UserError, match="must be a number from 0 to below 1"):
        hold_out(numbered([0, 1]), fraction)
    with pytest.raises(UserError, match="leaves nothing of 1 items"):
        hold_out(numbered([0]), 0.5)
