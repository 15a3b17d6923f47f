"""A room imports only from rooms below it, and each large library has one door."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ampexp"

LAYERS = [
    {"messages", "collection"},
    {"amp.levels", "boost.levels"},
    {"kernels", "boost"},
    {"amp"},
    {"networks", "data", "schedules"},
    {"metrics", "memory"},
    {"faults"},
    {"config"},
    {"option_files"},
    {"composition", "help", "targets"},
    {"tracking"},
    {"summary", "progress"},
    {"trainer", "report"},
    {"job"},
    {"__init__", "__main__"},
]
"""The rooms, bottom first; rooms of one layer do not see each other."""

DOORS = {
    "hydra": {"__main__", "composition", "targets"},
    "omegaconf": {"__main__", "composition", "config", "option_files"},
    "pydantic": {"config"},
    "mlflow": {"tracking"},
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    rooms = [room for layer in LAYERS for room in layer if module == room or module.startswith(f"{room}.")]
    assert rooms, f"{module} is in no room: give it a place in LAYERS"
    return max(rooms, key=len)


def layer_of(room: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if room in layer)


def imports(path: Path) -> Iterator[str]:
    """Give the dotted names that a file imports, inside functions too, for a type's name alone not."""
    nodes: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    for node in nodes:  # grows: the children of what is read
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    room = room_of(name_of(path))
    for imported in imports(path):
        if not imported.startswith("ampexp."):
            continue
        target = imported.removeprefix("ampexp.")
        if target.partition(".")[0] == "__version__":
            continue
        other = room_of(target)
        assert other == room or layer_of(other) < layer_of(room), f"{name_of(path)} imports {imported}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_each_library_has_one_door(path: Path) -> None:
    room = room_of(name_of(path))
    for imported in imports(path):
        doors = DOORS.get(imported.partition(".")[0])
        assert doors is None or room in doors, f"{name_of(path)} imports {imported}"


def test_nothing_is_called_after_no_idea() -> None:
    assert not {path.stem for path in MODULES} & {"utils", "common", "helpers"}
