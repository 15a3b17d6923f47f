"""The text of `--help`, made from the comments of the config files; it imports neither Hydra nor torch."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ampexp import option_files

USAGE = "python -m ampexp [command] [group=option] [section.key=value] [-m] [--config-dir DIR]"

ENDING = """\
A value goes by its dotted name: trainer.epochs=3, optimizer.lr=0.05; a new keyword argument by +network.width=32.
  --cfg job --resolve    show every value of the job and run nothing
  -m, --multirun         one job for each of several values: -m level=O0,O1,O2
  --config-dir DIR       a directory of your own options: DIR/network/mine.yaml is then network=mine
  --info, --hydra-help   what Hydra can say and do beside
"""


def text(commands: Mapping[str, str], folders: Sequence[Path]) -> str:
    """Write the help: commands, groups with their options, other keys, and what goes beside."""
    written = "\n".join([f"Usage: {USAGE}", "", *_commands(commands), *_groups(folders), *_keys(), "", ENDING])
    return written.encode("utf-8", "replace").decode("utf-8")  # a file's name need not be UTF-8


def _commands(commands: Mapping[str, str]) -> Iterator[str]:
    yield "Commands:"
    for name, said in commands.items():
        yield from _entry(name, said)
    yield ""


def _groups(folders: Sequence[Path]) -> Iterator[str]:
    chosen = _matches(r"^  - (\w+): (\w+) *# (.*)$")
    yield "Groups (* is chosen when nothing is said):"
    for group, default, said in chosen:
        yield f"{group}: {said}"
        yield from _options(group, default, folders)
    own = {path.parent.name for folder in folders for path in folder.glob("*/*.yaml") if path.is_file()}
    for group in sorted(own - {group for group, _, _ in chosen} - {"hydra"}):
        yield f"{group}: of your own (+{group}=...)"
        yield from _options(group, "", folders)
    yield ""


def _options(group: str, default: str, folders: Sequence[Path]) -> Iterator[str]:
    for name in option_files.options(group, *folders):
        path = next(
            path for folder in (option_files.home(), *folders) if (path := folder / group / f"{name}.yaml").is_file()
        )
        yield from _entry(f"{name} *" if name == default else name, option_files.meaning(path))


def _keys() -> Iterator[str]:
    yield "Keys of their own:"
    for said, key, value in _matches(r"^# (.*)\n(\w+): (\S+)$"):
        yield from _entry(f"{key}={value}", said)


def _matches(pattern: str) -> list[tuple[str, ...]]:
    written = (option_files.home() / "config.yaml").read_text("utf-8")
    return re.findall(pattern, written, flags=re.MULTILINE)


def _entry(name: str, said: str) -> list[str]:
    lines = textwrap.wrap(said, 90) or [""]
    if len(name) <= 20:
        return [f"  {name:<20} {lines[0]}".rstrip(), *(" " * 23 + line for line in lines[1:])]
    return [f"  {name}", *(" " * 23 + line for line in lines)]
