"""The small networks that come with the package, and the loss that serves them all."""

from ampexp.networks.cross_entropy import CrossEntropy
from ampexp.networks.lenet5 import LeNet5
from ampexp.networks.lstm import LSTM
from ampexp.networks.mlp import MLP
from ampexp.networks.resnet20 import ResNet20
from ampexp.networks.transformer import Transformer

__all__ = ["LSTM", "MLP", "CrossEntropy", "LeNet5", "ResNet20", "Transformer"]
