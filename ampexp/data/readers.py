"""Arrays from files: IDX, NPZ and the tables inside installed packages."""

from __future__ import annotations

import gzip
import importlib.util
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

from ampexp.messages import UserError, refusal

IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""The third byte of an IDX file and the big-endian numbers that it announces."""


def read_idx(path: str | Path) -> np.ndarray:
    """Read an IDX file, plain or gzipped: two zero bytes, the kind of number, the number of axes, the sizes, the data.

    Raises UserError, naming the file, where it cannot be read or is anything else.
    """
    content = read_bytes(path)
    if (
        len(content) < 4
        or content[:2] != b"\0\0"
        or content[2] not in IDX_DTYPES
        or content[3] == 0
    ):
        raise UserError(
            f"{path}: an IDX file must begin with 00 00, a kind of number "
            f"({', '.join(f'{code:02x}' for code in IDX_DTYPES)}) and the number of axes; got {content[:4].hex(' ')!r}"
        )
    dtype, num_axes = np.dtype(IDX_DTYPES[content[2]]), content[3]
    start = 4 + 4 * num_axes
    if len(content) < start:
        raise UserError(
            f"{path}: an IDX file of {num_axes} axes must have {start} bytes of header; got {len(content)}"
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", num_axes, offset=4))
    expected = start + dtype.itemsize * math.prod(shape)
    if len(content) != expected:
        raise UserError(
            f"{path}: an IDX file of shape {shape} must have {expected} bytes; got {len(content)}"
        )
    return (
        np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
    )


def read_npz(path: str | Path | None) -> dict[str, np.ndarray]:
    """Read every array of an .npz file; raises UserError where that cannot be done without running pickled code."""
    path = _given(path)
    try:
        with path.open("rb") as file:  # np.load itself leaves the file open where it fails
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        raise UserError(f"{path}: an .npz file is needed; {error.strerror or error}") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path}: an .npz file of plain arrays, as numpy.savez writes it, is needed"
        ) from error


def read_bytes(path: str | Path | None) -> bytes:
    """Read a whole file, unpacked where it is gzipped; raises UserError where that fails."""
    path = _given(path)
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: a whole gzip file is needed; {error}") from error
    except OSError as error:
        raise UserError(f"{path}: a readable file is needed; {error.strerror or error}") from error


def _given(path: str | Path | None) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise UserError(refusal("the path of the data", "the path of a file", path))
    return Path(path).expanduser()


def read_package_table(package: str, inside: str) -> np.ndarray:
    """Read a table of whole numbers 0..255 that lies in an installed package, which is not imported.

    Importing these packages takes seconds, reading the table a tenth of one.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{inside}: the package {package} must be installed")
    path = Path(spec.submodule_search_locations[0]) / inside
    try:
        return np.loadtxt(read_bytes(path).decode().splitlines(), dtype=np.uint8, delimiter=",")
    except (ValueError, OverflowError) as error:
        raise UserError(
            f"{path}: a table of numbers separated by commas is needed; {error}"
        ) from error
