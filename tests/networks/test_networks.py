"""Every network on every kind of data it is for."""

import copy
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ampexp import data
from ampexp.messages import UserError
from ampexp.networks import CrossEntropy, LeNet5, ResNet20, Transformer

CONF = Path(__file__).parents[2] / "conf"
IMAGE_NETWORKS = ("lenet5", "resnet20", "mlp")
TEXT_NETWORKS = ("lstm", "transformer")
IMAGE_DATA = ("mnist5k", "digits")
PAIRS = [(network, source) for network in IMAGE_NETWORKS for source in IMAGE_DATA] + [
    (network, "pydoc_topics") for network in TEXT_NETWORKS
]


@pytest.fixture(scope="module")
def datasets():
    return {name: getattr(data, name)() for name in (*IMAGE_DATA, "pydoc_topics")}


def make(network, facts):
    """Build a network as its YAML says, each `data` replaced by the fact of that name."""
    words = OmegaConf.to_container(OmegaConf.load(CONF / "network" / f"{network}.yaml"))
    words = {name: facts[name] if value == "data" else value for name, value in words.items()}
    torch.manual_seed(0)
    return instantiate(words, _convert_="all")


def test_every_network_is_tried():
    assert {path.stem for path in (CONF / "network").glob("*.yaml")} == {name for name, _ in PAIRS}


@pytest.mark.parametrize(("name", "source"), PAIRS)
def test_the_loss_falls_in_a_few_steps(name, source, datasets):
    dataset = datasets[source]
    network = make(name, dataset.facts)
    inputs, labels = next(iter(data.loader(dataset.train, 16, torch.Generator().manual_seed(0))))
    classes = dataset.facts.get("num_classes", dataset.facts.get("vocab_size"))
    assert network(inputs).shape == (*labels.shape, classes)

    optimizer = torch.optim.AdamW(network.parameters(), lr=0.003)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = CrossEntropy()(network(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.8  # near the logarithm of the number of classes: nothing is known yet
    assert losses[-1] < 0.9 * losses[0]
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("name", TEXT_NETWORKS)
def test_a_language_model_does_not_see_the_future(name, datasets):
    dataset = datasets["pydoc_topics"]
    network = make(name, dataset.facts).eval()
    tokens = dataset.train.inputs[:2].clone()
    before = network(tokens)
    tokens[:, 60] = (tokens[:, 60] + 1) % dataset.facts["vocab_size"]
    after = network(tokens)
    torch.testing.assert_close(after[:, :60], before[:, :60])
    assert not torch.allclose(after[:, 60:], before[:, 60:])


@pytest.mark.parametrize("name", TEXT_NETWORKS)
def test_dropout_acts_in_training_only(name, datasets):
    network = make(name, datasets["pydoc_topics"].facts)
    tokens = datasets["pydoc_topics"].train.inputs[:2]
    assert not torch.equal(network(tokens), network(tokens))
    network.eval()
    assert torch.equal(network(tokens), network(tokens))


def test_resnet20_has_twenty_layers_and_the_published_size():
    network = ResNet20(num_classes=10, in_channels=3)
    layers = [m for m in network.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert sum(1 for m in layers if getattr(m, "kernel_size", None) != (1, 1)) == 20
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(0.27e6, rel=0.02)


@pytest.mark.parametrize("size", [16, 28, 32, 33])
def test_lenet5_fits_every_image_size_it_accepts(size):
    network = LeNet5(num_classes=7, in_channels=2, image_size=size)
    assert network(torch.zeros(3, 2, size, size)).shape == (3, 7)


def test_what_cannot_be_built_is_refused_in_one_line():
    with pytest.raises(
        UserError, match="image_size of LeNet5 must be an integer of at least 16; got 8"
    ):
        LeNet5(image_size=8)
    with pytest.raises(
        UserError, match="num_heads of Transformer must be a divisor of the width 128; got 5"
    ):
        Transformer(vocab_size=9, num_heads=5)


def test_cross_entropy_is_the_mean_over_all_labels():
    logits, labels = torch.randn(4, 6, 5), torch.randint(0, 5, (4, 6))
    by_hand = -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
    torch.testing.assert_close(CrossEntropy()(logits, labels), by_hand)
    torch.testing.assert_close(CrossEntropy()(logits.flatten(0, 1), labels.flatten()), by_hand)


@pytest.mark.parametrize(("name", "source"), [(name, dict(PAIRS)[name]) for name in dict(PAIRS)])
def test_a_copy_stands_on_its_own_weights(name, source, datasets):
    network = make(name, datasets[source].facts).eval()
    inputs = datasets[source].train.inputs[:2]
    twin = copy.deepcopy(network)
    before = network(inputs)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert torch.equal(network(inputs), before)
    assert not torch.equal(twin(inputs), before)
