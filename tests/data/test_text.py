"""Text, character by character."""

import gzip
from pydoc_data.topics import topics

import pytest
import torch

from ampexp import data
from ampexp.messages import UserError

TEXT = "".join(f"{number} bottles of beer on the wall;\n" for number in range(400))


@pytest.fixture
def path(tmp_path):
    (tmp_path / "song.txt").write_text(TEXT, encoding="utf-8")
    return str(tmp_path / "song.txt")


def test_each_label_is_the_next_character_and_is_learned_once(path):
    dataset = data.textfile(path, sequence_length=16)
    vocabulary = sorted(set(TEXT))
    cut = int(0.9 * len(TEXT))
    for part, text in ((dataset.train, TEXT[:cut]), (dataset.test, TEXT[cut:])):
        read = "".join(vocabulary[token] for token in part.inputs.flatten())
        assert text.startswith(read)
        assert len(text) - len(read) <= 17
        labels = "".join(vocabulary[token] for token in part.labels.flatten())
        assert text[1:].startswith(labels)
    assert dataset.facts == {"vocab_size": len(vocabulary), "sequence_length": 16}
    assert not dataset.stratified


def test_the_help_topics_are_real_prose():
    dataset = data.pydoc_topics()
    assert dataset.facts["sequence_length"] == 128
    assert 50 < dataset.facts["vocab_size"] < 300
    tokens = (len(dataset.train) + len(dataset.test)) * 128
    assert 0.99 < tokens / sum(map(len, topics.values())) < 1.01
    assert dataset.train.inputs.dtype == dataset.train.labels.dtype == torch.int64
    assert dataset.digest == data.pydoc_topics().digest != data.pydoc_topics(64).digest


def test_a_gzipped_text_is_the_same_text(path, tmp_path):
    (tmp_path / "song.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert data.textfile(str(tmp_path / "song.gz")).digest == data.textfile(path).digest


def test_what_is_no_text_is_refused_in_one_line(path, tmp_path):
    (tmp_path / "short").write_text("hello")
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes("é".encode("latin-1") * 5000)
    for name, text in (
        ("short", "a text of about 1290 characters is needed"),
        ("empty", "a text of about 1290 characters is needed"),
        ("latin", "a text in UTF-8 is needed; byte 0 is not"),
        ("absent", "a readable file is needed; No such file or directory"),
    ):
        with pytest.raises(UserError, match=f"{tmp_path / name}: {text}"):
            data.textfile(str(tmp_path / name))
    with pytest.raises(UserError, match="must be the path of a file; got None"):
        data.textfile()
    with pytest.raises(
        UserError, match="data.sequence_length must be an integer of at least 1; got 0"
    ):
        data.textfile(path, sequence_length=0)
