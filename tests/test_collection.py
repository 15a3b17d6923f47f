from __future__ import annotations

import gc
import subprocess
import sys

import pytest

import ampexp
from ampexp import collection, trainer
from ampexp.__main__ import main


@pytest.fixture(autouse=True)
def _enabled():
    gc.enable()
    yield
    gc.enable()


def test_a_pause_ends_and_nests() -> None:
    with collection.paused():
        assert not gc.isenabled()
        with collection.paused():
            assert not gc.isenabled()
        collection.resume()
        assert gc.isenabled()
    assert gc.isenabled()


def test_what_the_user_switched_off_stays_off() -> None:
    gc.disable()
    with collection.paused():
        collection.resume()
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_training_collects_and_a_mistake_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    whole = trainer.evaluate
    monkeypatch.setattr(trainer, "evaluate", lambda *given: (seen.append(gc.isenabled()), whole(*given))[1])
    words = ("tracker=none", "network=mlp", "data=digits", "trainer.epochs=1", "trainer.progress=none")
    ampexp.run(ampexp.compose(*words))
    assert set(seen) == {True}
    assert main(["level=o2"]) == 2
    assert gc.isenabled()


def test_a_process_of_ours_keeps_what_its_start_made() -> None:
    frozen = gc.get_freeze_count()
    with collection.paused():
        pass
    assert gc.get_freeze_count() == frozen
    with collection.paused(keep=True):
        pass
    assert gc.get_freeze_count() > frozen
    gc.unfreeze()


_FAULTS = """
import resource, sys
from ampexp import collection
if sys.argv[1] == "keep" and not collection.keep_freed_memory():
    print("none")
    sys.exit()
bytearray(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    bytearray(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_kept_for_the_next_tensor() -> None:
    """Blocks of 16 MiB, given back and asked for again: without a page fault."""
    said = subprocess.run([sys.executable, "-c", _FAULTS, "keep"], capture_output=True, text=True, check=True)
    if said.stdout.strip() == "none":
        pytest.skip("the C library is not glibc")
    assert int(said.stdout) < 100
