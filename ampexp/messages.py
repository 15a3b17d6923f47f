"""One sentence for what is refused: where, what is allowed, what came, and the nearest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def refusal(where: str, allowed: str | Iterable[str], got: object) -> str:
    """Say why a value is refused.

    `allowed` is a phrase ("a positive integer") or the words of a table; with words the nearest one is suggested.

    >>> refusal("level", ("O0", "O1", "O2"), "o2")
    "level must be one of O0, O1, O2; got 'o2' (did you mean O2?)"
    >>> refusal("trainer.epochs", "an integer of at least 1", 0)
    'trainer.epochs must be an integer of at least 1; got 0'
    """
    if isinstance(allowed, str):
        return f"{where} must be {allowed}; got {got!r}"
    words = [str(word) for word in allowed]
    return f"{where} must be one of {', '.join(words)}; got {got!r}{nearest(got, words)}"


def nearest(got: object, words: Iterable[str]) -> str:
    """Give ` (did you mean X?)` for the word closest to `got`, ignoring case, or nothing."""
    if not isinstance(got, str):
        return ""
    folded = {word.casefold(): word for word in words}
    match = difflib.get_close_matches(got.casefold(), folded, n=1)
    return f" (did you mean {folded[match[0]]}?)" if match else ""


class UserError(Exception):
    """A mistake that the user can mend: its text is one line a fault, shown without a stack trace; exit status 2."""
