"""The boost levels as a table of words; nothing here knows torch."""

from __future__ import annotations

BOOST_LEVELS: dict[str, tuple[str, ...]] = {
    "O0": (),
    "O1": ("grad_freeze", "grad_centralization"),
    "O2": ("grad_freeze", "grad_centralization"),
}
"""The boosts of each level, in the order in which they wrap the update, outermost first."""

NOTES = {"O2": "O2 holds the boosts of O1 in this version"}
"""What the record says of a level beside its boosts."""
