"""Data sets of text, character by character: each label is the input moved on by one."""

from __future__ import annotations

import hashlib

import torch

from ampexp.data.dataset import DataSet, Tensors
from ampexp.data.readers import read_bytes
from ampexp.messages import UserError, refusal

TRAIN_FRACTION = 0.9
"""The part of a text, from its beginning, that is train."""


def pydoc_topics(sequence_length: int = 128) -> DataSet:
    """Give the 465,000 characters of Python's own help topics, which differ a little from version to version."""
    from pydoc_data.topics import topics

    return _text(
        "pydoc_topics", "\n".join(topics[name] for name in sorted(topics)), sequence_length
    )


def textfile(path: str | None = None, sequence_length: int = 128) -> DataSet:
    """Give a user's UTF-8 text, plain or gzipped; raises UserError where it is none or too short."""
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: a text in UTF-8 is needed; byte {error.start} is not") from error
    return _text(str(path), text, sequence_length)


def _text(name: str, text: str, sequence_length: int) -> DataSet:
    if sequence_length < 1:
        raise UserError(
            refusal("data.sequence_length", "an integer of at least 1", sequence_length)
        )
    vocabulary = {character: token for token, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([vocabulary[character] for character in text])
    cut = int(TRAIN_FRACTION * len(text))
    train, test = tokens[:cut], tokens[cut:]
    if len(test) <= sequence_length:
        needed = 10 * (sequence_length + 1)
        raise UserError(
            f"{name}: a text of about {needed} characters is needed for sequences of {sequence_length}; got {len(text)}"
        )
    return DataSet(
        name,
        _sequences(train, sequence_length),
        _sequences(test, sequence_length),
        {"vocab_size": len(vocabulary), "sequence_length": sequence_length},
        hashlib.sha256(f"{sequence_length} {text}".encode()).hexdigest(),
        stratified=False,
    )


def _sequences(tokens: torch.Tensor, length: int) -> Tensors:
    """Cut tokens (N,) into inputs and labels (S, length) that lie side by side, so that each label is learned once."""
    count = (len(tokens) - 1) // length
    return Tensors(
        tokens[: count * length].view(count, length),
        tokens[1 : count * length + 1].view(count, length),
    )
