"""Keys: any text becomes a legal key and comes back; no two texts share one."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric

from ampexp.tracking import open_tracker
from ampexp.tracking.keys import as_text, decode_key, encode_key, flatten, is_cut, storable

TRICKY = ["", "_x_", "_", "_x", "_x41_", "_x5f_", "_x00_", "__x_", ".", "..", "...", "..a", "./a"]
TRICKY += ["/", "//", "/a", "a/", "a//b", "a/./b", "a/../b", "../x", "a/..", "a\n", "\n", "\0"]
TRICKY += [
    "top@5",
    "50%",
    "loss[0]",
    "é/中",
    "\ud800",
    "😀",
    " ",
    "_x41@",
    "_x@",
    "@x41_",
    "a" * 250,
]
LONG = ["a" * 251, "@" * 60, "x/" * 200, "b" * 208 + "_x41_" * 20]
TRICKY += LONG + ["a.b/..c", "_x2e_.", "C:\\x", "a:b"]

texts = st.one_of(
    st.text(),
    st.text(alphabet="_x0f2e/.@:aA \n", max_size=12),  # where the rules meet
    st.text(min_size=240, max_size=300),
)


def law(text):
    key = encode_key(text)
    assert len(key) <= 250
    assert not key.endswith("\n")
    _validate_metric(key, 1.0, 0, 0)
    assert is_cut(key) == (decode_key(key, {key: None}) is None)
    assert decode_key(key, {key: text}) == text
    return key


@settings(deadline=None)  # a machine may be busy
@given(texts)
@example("_x41@")
def test_any_text_becomes_a_key_and_comes_back(text):
    law(text)


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_text_becomes_a_key_and_comes_back(text):
    law(text)


def test_only_long_keys_need_the_table():
    assert [text for text in TRICKY if is_cut(encode_key(text))] == LONG
    with pytest.raises(KeyError):
        decode_key(encode_key("a" * 251))


@settings(deadline=None)
@given(texts, texts)
def test_two_texts_never_share_a_key(first, second):
    assert (encode_key(first) == encode_key(second)) == (first == second)


def test_ordinary_names_stay_as_they_are():
    for name in ("loss/train", "grad_x", "step_xla", "max_x", "lr", "cuda:0 peak.bytes"):
        assert encode_key(name) == name


def test_the_real_store_takes_every_key_as_metric_param_and_tag(launch):
    tracker = open_tracker("mlflow", None, "keys", None, launch)
    with tracker.run(
        {text: text for text in TRICKY}, "", {f"t{text}": "1" for text in TRICKY}
    ) as run:
        run.log_metrics({text: float(index) for index, text in enumerate(TRICKY)}, step=0)
    kept = tracker.client.get_run(run.run_id)
    table = json.loads((launch / "mlruns" / run.run_id / "artifacts/keys.json").read_text())
    decoded = {decode_key(key, table): value for key, value in kept.data.metrics.items()}
    assert decoded == {text: float(index) for index, text in enumerate(TRICKY)}
    assert len(kept.data.params) == len(TRICKY)
    assert {decode_key(key, table) for key in kept.data.tags} >= {f"t{text}" for text in TRICKY}


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.lists(st.integers(), max_size=2))
names = st.text(alphabet='ab."[', max_size=3)
configs = st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3))


@settings(deadline=None)
@given(st.dictionaries(names, configs, max_size=3))
def test_flatten_loses_no_leaf(config):
    def count(node):
        if isinstance(node, dict) and node:
            return sum(count(value) for value in node.values())
        return 1

    assert len(flatten(config)) == (count(config) if config else 0)


def test_flatten_tells_paths_apart():
    config = {"a": {"b": 1}, "a.b": 2, "n": None, "empty": {}, "list": [{"x": 1}]}
    assert flatten(config) == {
        "a.b": 1, '["a.b"]': 2, "n": None, "empty": {}, "list": [{"x": 1}]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), (None, "null"), (1e-5, "1e-05"), ([1], "[1]"), ("on", "on")]
)
def test_leaves_are_written_as_json(value, text):
    assert as_text(value) == text


@settings(deadline=None)
@given(st.text())
def test_storable_text_is_valid_and_short(text):
    written = storable(text, 20)
    assert len(written) <= 20
    assert "\0" not in written
    written.encode()
