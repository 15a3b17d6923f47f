"""Names that MLflow takes, made from any text and back; a nested config as flat parameters."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_KEY = 250
MAX_VALUE = 6000
MAX_TAG = 5000

_EMPTY = "_x_"
# no character is written with a leading zero, so this cannot come from any text
_CUT = "_x00_"
_ESCAPED = re.compile(r"_x([0-9a-f]+)_")
# what MLflow refuses: characters outside its set, and an underscore that would read as an escape
_ILLEGAL = re.compile(r"[^\w\-. /:]|_(?=x[0-9a-f])")
# what it refuses as a path: "/x", "x/", "a//b", and the parts "." and "..", or ".." in front
_PATH = re.compile(r"^/|/$|(?<=/)/|^\.(?=\.)|(?:(?<=/)|^)\.(?=\.?(?:/|$))")


def encode_key(text: str) -> str:
    r"""Make any text a legal MLflow key, one to one.

    A character that MLflow refuses becomes `_x<hexadecimal code point>_`; text that is legal stays
    as it is. A key over 250 characters keeps its head and ends in `_x00_` and a SHA-256 prefix:
    `decode_key` then needs the table of long keys.

    >>> encode_key("top@5/a//b"), encode_key("loss/train"), encode_key("../up")
    ('top_x40_5/a/_x2f_b', 'loss/train', '_x2e_./up')
    """
    if text == "":
        return _EMPTY
    if text == _EMPTY:
        return "_x5f_x_"
    encoded = _PATH.sub(_escape, _ILLEGAL.sub(_escape, text))
    if len(encoded) > MAX_KEY:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        head = encoded[: MAX_KEY - len(_CUT) - len(digest)]
        # half an escape at the end would read on into the mark
        encoded = re.sub(r"(_x[0-9a-f]*)+$", "", head) + _CUT + digest
    return encoded


def decode_key(encoded: str, long_keys: Mapping[str, str] | None = None) -> str:
    """Give the text that `encode_key` made `encoded` from.

    `long_keys` maps shortened keys to their texts; a run keeps it as the artifact `keys.json`.

    Raises:
        KeyError: `encoded` was shortened and is not in `long_keys`.
    """
    if is_cut(encoded):
        return (long_keys or {})[encoded]
    if encoded == _EMPTY:
        return ""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), encoded)


def is_cut(encoded: str) -> bool:
    """Say whether the key was too long, so that its text is in the table of long keys only."""
    return any(match[0] == _CUT for match in _ESCAPED.finditer(encoded))


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give every leaf of a nested mapping under its dotted path; lists and empty mappings are leaves.

    A part that holds a dot, quote or bracket, or is no text, is written as `["part"]`, so that two
    leaves never share a path.

    >>> flatten({"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "a.b": {}})
    {'optimizer.lr': 0.1, 'optimizer.betas': [0.9, 0.99], '["a.b"]': {}}
    """
    return dict(_leaves(config, ()))


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and (node or not path):
        for key, value in node.items():
            plain = isinstance(key, str) and key and not set(key) & set('."[')
            yield from _leaves(value, (*path, key if plain else json.dumps([key], default=str)))
    else:
        yield ".".join(path), node


def as_text(value: Any) -> str:
    """Write a leaf: text as it is, all else as JSON (`true`, `null`, `[1, 2]`)."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def storable(text: str, limit: int | None = None) -> str:
    """Write out what databases refuse (lone surrogates, NUL) and cut to `limit` characters."""
    text = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    if limit is None or len(text) <= limit:
        return text
    note = f"... ({len(text)} characters)"
    return text[: limit - len(note)] + note


def _escape(match: re.Match[str]) -> str:
    return f"_x{ord(match[0]):x}_"
