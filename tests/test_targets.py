from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import ListConfig

from ampexp.messages import UserError
from ampexp.targets import make


@pytest.mark.parametrize(
    ("given", "kind"), [({}, list), ({"_convert_": "all"}, list), ({"_convert_": "none"}, ListConfig)]
)
def test_containers_arrive_as_the_section_says(given: dict[str, str], kind: type) -> None:
    made = make("network", {"_target_": "builtins.dict", "sizes": [3], **given})
    assert made["sizes"] == [3]
    assert type(made["sizes"]) is kind


def test_a_module_that_fails_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fails_itself.py").write_text("x = 1\ny = 1 / 0\n")
    (tmp_path / "lacks_another.py").write_text("import no_such_package\n")
    with pytest.raises(UserError, match=r"importing fails_itself fails: ZeroDivisionError.*fails_itself\.py:2"):
        make("network", {"_target_": "fails_itself.Net"})
    with pytest.raises(UserError, match="importing lacks_another fails: No module named 'no_such_package'"):
        make("network", {"_target_": "lacks_another.Net"})
    with pytest.raises(UserError, match="no module 'nowhere' here"):
        make("network", {"_target_": "nowhere.Net"})
