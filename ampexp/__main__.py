"""The command line: `python -m ampexp [command] [overrides]`."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ampexp import collection
from ampexp.messages import UserError, refusal

if TYPE_CHECKING:
    from omegaconf import DictConfig

MISTAKE, FAILURE = 2, 1
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + the signal's number, as a shell says it
FULL_ERROR = "HYDRA_FULL_ERROR"
BRIEF = "AMPEXP_BRIEF_ERRORS"
"""Set beside FULL_ERROR when that is ours and not the user's; an environment variable reaches a sweep's processes."""


class JobFailed(Exception):
    """A job of a sweep failed and has said so; the sweep goes on and ends with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and give the exit status: 0, 1 for a failure, 2 for a mistake, 128 + signal."""
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed: nobody is to be told anything
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115, it lives as long as the process
    if sys.stdout is None:
        print("stdout is closed: give it a place to write to (>/dev/null throws it away)", file=sys.stderr)
        return FAILURE
    if os.getcwd() not in sys.path and "" not in sys.path:  # `ampexp` finds a user's modules as `python -m ampexp` does
        sys.path.insert(0, os.getcwd())
    try:
        try:
            with collection.paused(keep=argv is None):  # until training begins
                return _dispatch(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone (`| head`)
        _drop_stdout()
        return BROKEN_PIPE
    except OSError as error:
        return _say_of_stdout(error) if _names_no_file(error) else _say(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except UserError as error:
        return _say(error)


def _drop_stdout() -> None:
    """Write the rest to nowhere: the flush at exit would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_of_stdout(error: OSError) -> int:
    _drop_stdout()
    print(f"stdout cannot be written: {error.strerror}", file=sys.stderr)
    return FAILURE


def _names_no_file(error: OSError) -> bool:
    """Tell whether the system refused to write to an open stream, as it does when a disk is full."""
    return error.errno is not None and error.filename is None


def _dispatch(words: list[str]) -> int:
    command = "train"
    if words and "=" not in words[0] and not words[0].startswith(("-", "+", "~")):
        command = words.pop(0)
    if command not in COMMANDS:
        raise UserError(refusal("the command", COMMANDS, command))
    if "--help" in words or "-h" in words:
        from ampexp import help

        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config-dir", "-cd", action="append", default=[], type=Path)
        known, _ = parser.parse_known_args(words)
        print(help.text({name: said for name, (_, said) in COMMANDS.items()}, known.config_dir))
        return 0
    return COMMANDS[command][0](words)


def train(words: list[str]) -> int:
    """Hand the overrides to Hydra, and say what it raises in readable lines."""
    import hydra
    from hydra._internal.utils import get_args_parser

    from ampexp import composition

    parser = get_args_parser()
    parser.prog = "python -m ampexp"
    args = parser.parse_intermixed_args(words)
    overrides = list(args.overrides)
    silent = bool(args.shell_completion or args.hydra_help or args.experimental_rerun)
    if not silent and (faults := composition.refusals(overrides, args.config_dir)[0]):
        if not args.multirun:
            composition.compose(*overrides, config_dir=args.config_dir)  # raises all faults at once
        raise composition.ConfigError(faults)
    flags = list(words)
    for word in overrides:
        flags.remove(word)
    start = hydra.main(
        version_base=composition.VERSION_BASE,
        config_path=f"pkg://{composition.PACKAGE}",
        config_name=composition.CONFIG_NAME,
    )(job)
    try:
        with _hydra_raises([*overrides, *flags]):
            start()
    except JobFailed as error:
        return error.status
    except composition.MISTAKES as error:
        if args.multirun or args.config_path or args.config_name:
            raise composition.ConfigError([composition.explain(error, overrides, args.config_dir)[0]]) from error
        composition.compose(*overrides, config_dir=args.config_dir)
        raise composition.ConfigError([composition.explain(error, overrides, args.config_dir)[0]]) from error
    except OSError as error:  # where Hydra reads and writes: a directory that is none, or is not ours
        if _names_no_file(error):
            raise
        raise UserError(composition.explain(error, overrides, args.config_dir)[0]) from error
    return 0


def ui(words: list[str]) -> int:
    """Serve MLflow's pages on the store that the tracker writes to."""
    from ampexp import composition
    from ampexp.tracking.ui import serve

    given = {"host": "127.0.0.1", "port": "5000"}
    overrides = []
    for word in words:
        key, sign, value = word.partition("=")
        if sign and key in given:
            given[key] = value
        elif key.startswith("tracker"):
            overrides.append(word)
        else:
            raise UserError(refusal("what follows ui", ("host=", "port=", "tracker.uri="), word))
    if not (given["port"].isascii() and given["port"].isdigit() and 0 < int(given["port"]) < 2**16):
        raise UserError(refusal("port", "an integer of at least 1 and below 65536", given["port"]))
    tracker = composition.compose(*overrides).tracker
    if tracker.name == "none":
        raise UserError("tracker=none records nothing, and there is nothing to show: leave it out")
    port = int(given["port"])
    serve(tracker.uri, Path.cwd(), given["host"], port, experiment=tracker.experiment)
    return 0


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train, "train, measure and log one job; what runs when no command is named"),
    "ui": (ui, "open MLflow on the store of this directory: ui [host=127.0.0.1] [port=5000] [tracker.uri=...]"),
}
"""The commands: what runs, and what the help says."""


def job(config: DictConfig) -> None:
    """Run one job of Hydra's: check the config, then train; say what fails here, where all is still known."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from ampexp import composition

    hydra_config = HydraConfig.get()
    try:
        parsed = composition.parse(config, hydra_config)
        from ampexp.job import run

        run(parsed)
        return
    except BrokenPipeError:
        raise SystemExit(BROKEN_PIPE) from None
    except Exception as error:
        if isinstance(error, OSError) and _names_no_file(error) and _stdout_is_lost():
            raise SystemExit(_say_of_stdout(error)) from error
        sweep = hydra_config.mode == RunMode.MULTIRUN
        label = f"job {hydra_config.job.num} ({hydra_config.job.override_dirname}): " if sweep else ""
        status = _say(error, label)
        if sweep:
            raise JobFailed(status) from error
        raise SystemExit(status) from error


def _stdout_is_lost() -> bool:
    try:
        print(flush=True)  # without a buffer there is nothing to flush: only a new line tells
    except OSError:
        return True
    return False


def _say(error: Exception, label: str = "") -> int:
    """Say an error on stderr, a mistake in its own lines and a failure by its last line; give the exit status."""
    full = os.environ.get(FULL_ERROR) == "1" and BRIEF not in os.environ
    if full:
        traceback.print_exception(error)
    if isinstance(error, UserError):
        print(*[f"{label}{line}" for line in str(error).splitlines()], sep="\n", file=sys.stderr)
        return MISTAKE
    if not full:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((frame for frame in reversed(frames) if _is_the_users(frame.filename)), frames[-1])
        last = traceback.format_exception_only(error)[-1].strip()
        print(
            f"{label}{last}\n  at {where.filename}:{where.lineno} in {where.name}\n"
            f"{FULL_ERROR}=1 shows the full traceback; a tracked run holds it too",
            file=sys.stderr,
        )
    return FAILURE


def _is_the_users(filename: str) -> bool:
    """Tell whether a frame's file belongs neither to Python, nor to an installed package, nor to this one."""
    if filename.startswith("<") or {"site-packages", "dist-packages"} & set(Path(filename).parts):
        return False
    ours = (Path(__file__).parent, sysconfig.get_path("stdlib"))
    return not any(Path(filename).is_relative_to(folder) for folder in ours)


@contextmanager
def _hydra_raises(words: list[str]) -> Iterator[None]:
    """Let Hydra read `words` as its command line and raise what goes wrong, instead of printing a stack trace."""
    import logging

    argv, environment, loud = sys.argv, os.environ.copy(), logging.raiseExceptions
    sys.argv = [argv[0], *words]
    if os.environ.get(FULL_ERROR) != "1":
        os.environ.update({FULL_ERROR: "1", BRIEF: "1"})
        logging.raiseExceptions = False  # a line that stdout does not take: main's flush says it, in one line
    try:
        yield
    finally:
        sys.argv, logging.raiseExceptions = argv, loud
        for name in (FULL_ERROR, BRIEF):
            if name in environment:
                os.environ[name] = environment[name]
            else:
                os.environ.pop(name, None)


if __name__ == "__main__":
    # By this name the functions can be imported in the process of another job.
    from ampexp.__main__ import main as named_main

    raise SystemExit(named_main())
