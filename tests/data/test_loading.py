"""Laws of the loader and of what counts as a data set."""

import types

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from ampexp.data import DataSet, Tensors, as_dataset, loader
from ampexp.messages import UserError

INPUTS = torch.arange(37).float()[:, None].repeat(1, 3)
LABELS = torch.arange(37)
KINDS = {
    "ours": Tensors(INPUTS, LABELS),
    "torch's": TensorDataset(INPUTS, LABELS),
    "a part of ours": Subset(Tensors(INPUTS, LABELS), list(range(37))),
    "a list": [(INPUTS[index], index) for index in range(37)],
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def passes(dataset, seed, num_workers=0, count=2):
    batches = loader(dataset, 8, None if seed is None else seeded(seed), num_workers)
    return [[labels.tolist() for _, labels in batches] for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_item_comes_once_and_the_last_batch_is_smaller(kind):
    batches = list(loader(KINDS[kind], 8))
    assert len(loader(KINDS[kind], 8)) == len(batches) == 5
    assert [len(labels) for _, labels in batches] == [8, 8, 8, 8, 5]
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), INPUTS)
    assert torch.equal(torch.cat([labels for _, labels in batches]), LABELS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_alone_decides_the_order(kind):
    first, second = passes(KINDS[kind], seed=1)
    assert first != second  # each pass is shuffled anew
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(37))
    assert passes(KINDS[kind], seed=1) == [first, second] == passes(KINDS["ours"], seed=1)
    assert passes(KINDS[kind], seed=2) != [first, second]


@pytest.mark.parametrize("kind", ["ours", "a list"])
def test_the_number_of_workers_changes_nothing(kind):
    assert passes(KINDS[kind], seed=1, num_workers=2) == passes(KINDS[kind], seed=1)


def test_the_generator_alone_is_drawn_from_once_a_pass():
    state = torch.get_rng_state()
    generator, twin = seeded(5), seeded(5)
    batches = loader(KINDS["ours"], 8, generator)
    rows = [labels for _, labels in batches]
    assert torch.equal(torch.cat(rows), torch.randperm(37, generator=twin))
    assert torch.equal(generator.get_state(), twin.get_state())
    assert list(loader(KINDS["torch's"], 8))
    assert torch.equal(state, torch.get_rng_state())


def test_as_dataset_takes_what_the_door_names():
    train, test = KINDS["ours"], KINDS["torch's"]
    mine = types.SimpleNamespace(
        train=train, test=test, facts={"num_classes": 37}, stratified=False
    )
    ready = DataSet("ready", train, test)
    assert as_dataset(ready) is ready
    for obj in ((train, test), [train, test], mine):
        dataset = as_dataset(obj)
        assert (dataset.train, dataset.test) == (train, test)
    assert (dataset.facts, dataset.stratified, dataset.digest) == ({"num_classes": 37}, False, "")


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        (5, "data must be a DataSet, a pair .* got int"),
        ((1, 2, 3), "data must be a DataSet, a pair .* got tuple of 3"),
        ((KINDS["ours"], 7), "test of the data must be a map-style data set .* got int"),
        (
            (iter([]), KINDS["ours"]),
            "train of the data must be a map-style data set .* got list_iterator",
        ),
        ((KINDS["ours"], []), "the length of test of the data must be at least 1; got 0"),
    ],
)
def test_as_dataset_refuses_the_rest(obj, text):
    with pytest.raises(UserError, match=text):
        as_dataset(obj)
