"""Data sets of real images and real text, their fixed splits and their loaders."""

from ampexp.data.dataset import DataSet, Tensors, as_dataset
from ampexp.data.images import Shift, digits, fashion_mnist, idx, mnist5k, npz
from ampexp.data.loading import loader
from ampexp.data.split import hold_out
from ampexp.data.text import pydoc_topics, textfile

__all__ = [
    "DataSet",
    "Shift",
    "Tensors",
    "as_dataset",
    "digits",
    "fashion_mnist",
    "hold_out",
    "idx",
    "loader",
    "mnist5k",
    "npz",
    "pydoc_topics",
    "textfile",
]
