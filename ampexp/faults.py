"""What is wrong with a config, said in one line a fault, from the errors and the schema that a model gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampexp.messages import nearest, refusal

LONGEST = 60
"""Characters of a refused value that are shown."""

YAML_READS = "YAML reads yes, on as true and no, off as false"
YAML_BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


@dataclass(frozen=True)
class Fault:
    """One fault: the dotted path of the field, and the line that says it."""

    path: str
    text: str


@dataclass(frozen=True)
class Rule:
    """What fields cannot say together: `broken` gets their values, `text` names the ways out."""

    fields: tuple[str, ...]
    broken: Callable[..., bool]
    text: str


class _Spelled:
    """A value as YAML spells it, on one line and not too long."""

    def __init__(self, value: object) -> None:
        self.text = spell(value)

    def __repr__(self) -> str:
        return self.text


def spell(value: object) -> str:
    """Spell a value as YAML does, on one line and not too long.

    >>> spell(None), spell(True), spell("O2"), spell([1, None])
    ('null', 'true', "'O2'", '[1, null]')
    """
    match value:
        case None:
            text = "null"
        case bool():
            text = str(value).lower()
        case int() if value.bit_length() > 256:
            text = f"an integer of {value.bit_length()} bits"
        case int() | float():
            text = repr(value)
        case str():
            text = repr(value[: LONGEST + 1])
        case Mapping():
            text = "{" + ", ".join(f"{key}: {spell(item)}" for key, item in list(value.items())[:LONGEST]) + "}"
        case list() | tuple():
            text = "[" + ", ".join(spell(item) for item in value[:LONGEST]) + "]"
        case _:
            text = f"an object of type {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def one_line(error: object) -> str:
    r"""Give a message of several lines as one.

    >>> one_line("no key 'a'  \n   full_key: a\n")
    "no key 'a'; full_key: a"
    """
    return "; ".join(" ".join(line.split()) for line in str(error).splitlines() if line.strip())


def refuse(where: str, allowed: str | Iterable[str], got: object) -> str:
    """Say why a value is refused, and how what was meant is written when that can be guessed."""
    words = None if isinstance(allowed, str) else list(allowed)
    short = isinstance(got, str) and len(got) <= LONGEST and got.isprintable()
    text = refusal(where, allowed if words is None else words, got if short else _Spelled(got))
    return text + _hint(allowed if isinstance(allowed, str) else " ".join(words or ()), words, got)


def _hint(allowed: str, words: list[str] | None, got: object) -> str:
    """Guess what was meant by a value of the wrong kind."""
    if got is None:
        return " (write none)" if words and "none" in words else ""
    numeric = "number" in allowed or "integer" in allowed
    if isinstance(got, bool):
        if words or allowed.startswith("a text"):
            return f" ({YAML_READS}: a word is put in quotes)"
        return f" ({YAML_READS})" if numeric else ""
    if allowed.startswith("a text"):
        return " (put it in quotes)" if isinstance(got, int | float) else ""
    if isinstance(got, float) and got.is_integer() and "integer" in allowed:
        return f" (write {got:.0f})"
    if not isinstance(got, str):
        return ""
    if "true" in allowed.split() and got.lower() in YAML_BOOLEANS:
        return f" (write {YAML_BOOLEANS[got.lower()]})"
    if got.lower() in ("null", "none", "~") and "null" in allowed.split():
        return " (write null)"
    number = meant_number(got) if numeric else ""
    return f" (a text is no number: write {number})" if number else ""


def meant_number(text: str) -> str:
    """Give the number that a text means, as YAML spells it, or nothing.

    >>> meant_number("2**24"), meant_number("010"), meant_number("64"), meant_number("1e-3"), meant_number("fast")
    ('16777216 or 1.6777216e7', '10', '64', '0.001', '')
    """
    text = text.strip()
    if power := re.fullmatch(r"(\d{1,4})\s*\*\*\s*(-?\d{1,2})", text):
        base, exponent = int(power[1]), int(power[2])
        if exponent < 0:
            return repr(float(base) ** exponent) if base else ""
        digits = len(str(base**exponent)) - 1
        short = f" or {base**exponent / 10**digits!r}e{digits}" if 3 <= digits <= 15 else ""
        return f"{base**exponent}{short}"
    if re.fullmatch(r"[-+]?[0-9][0-9_]{0,30}", text):
        return str(int(text.replace("_", "")))
    if re.fullmatch(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", text):
        return repr(float(text))
    return ""


def copy_plain(value: Any, path: str, found: list[Fault]) -> Any:
    """Copy mappings and lists into plain dicts and lists; what is no plain data, or open (`???`), is a fault."""
    if isinstance(value, Mapping):
        return {str(key): copy_plain(item, join(path, str(key)), found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_plain(item, f"{path}[{index}]", found) for index, item in enumerate(value)]
    if value == "???":
        found.append(Fault(path, f"{path} must be given: the config leaves it open (???)"))
    elif not (value is None or isinstance(value, str | bool | int | float)):
        found.append(Fault(path, refuse(path, "plain data (a text, number, boolean, null, list or mapping)", value)))
    elif isinstance(value, str) and re.fullmatch(r"\s*\d+\s*\*\*\s*-?\d+\s*", value):
        found.append(Fault(path, refuse(path, "a number or a word, and YAML does not calculate", value)))
    return value


CONVERSIONS = ("none", "partial", "object", "all")
HYDRA_KEYS: dict[str, tuple[str | tuple[str, ...], Callable[[Any], bool]]] = {
    "_args_": ("a list", lambda value: isinstance(value, list)),
    "_partial_": ("true or false", lambda value: isinstance(value, bool)),
    "_recursive_": ("true or false", lambda value: isinstance(value, bool)),
    "_convert_": (CONVERSIONS, lambda value: value in CONVERSIONS),
}
"""What Hydra reads beside a `_target_`, as its `instantiate` documents it."""


def of_target(value: Any, path: str) -> Iterator[Fault]:
    """Refuse what Hydra cannot take in a section, and in all sections inside it, that a `_target_` is made from."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from of_target(item, f"{path}[{index}]")
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        where = join(path, key)
        allowed, holds = HYDRA_KEYS.get(key, ("", None))
        if holds is not None and not holds(item):
            yield Fault(where, refuse(where, allowed, item))
        elif holds is None and key.startswith("_") and key != "_target_" and "_target_" in value:
            yield _unknown(path, key, ["_target_", *HYDRA_KEYS], "with an underscore in front ")
        yield from of_target(item, where)


def join(path: str, key: str) -> str:
    """Join a dotted path and a key.

    >>> join("", "trainer"), join("trainer", "epochs")
    ('trainer', 'trainer.epochs')
    """
    return f"{path}.{key}" if path else key


def explain(errors: Sequence[Mapping[str, Any]], schema: Mapping[str, Any]) -> list[Fault]:
    """Say each field's fault once, what is allowed taken from the JSON schema of the model."""
    found: dict[str, Fault] = {}
    for error in errors:
        fault = _explain(error, schema)
        found.setdefault(fault.path, fault)
    return list(found.values())


def _explain(error: Mapping[str, Any], schema: Mapping[str, Any]) -> Fault:
    node, path = schema, ""
    keys = [str(key) for key in error["loc"]]
    for index, key in enumerate(keys):
        if "discriminator" in node:  # the place names the member of the union by its tag, which is no key
            node = _deref({"$ref": node["discriminator"]["mapping"][key]}, schema)
            continue
        known = node.get("properties", {})
        if key not in known:
            if error["type"] in ("extra_forbidden", "invalid_key") and index == len(keys) - 1:
                return _unknown(path, key, list(known))
            break  # the place goes on inside a union of plain kinds
        node, path = _deref(known[key], schema), join(path, key)
    where = path or "the config"
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tags = list(node["discriminator"]["mapping"])
        got = error["input"]
        if "name" not in got:
            return Fault(f"{path}.name", f"{where}.name is missing: it must be one of {', '.join(tags)}")
        return Fault(f"{path}.name", refuse(f"{where}.name", tags, got["name"]))
    allowed = _allowed(node)
    if error["type"] == "missing":
        said = allowed if isinstance(allowed, str) else f"one of {', '.join(allowed)}"
        return Fault(path, f"{where} is missing: it must be {said}")
    has_none = "none" in node.get("discriminator", {}).get("mapping", ())
    hint = " (write none)" if error["input"] is None and has_none else ""
    return Fault(path, refuse(where, allowed, error["input"]) + hint)


def _unknown(path: str, key: str, known: list[str], which: str = "") -> Fault:
    holder = path or "the config"
    plain = key.isprintable() and 0 < len(key) <= LONGEST
    where = join(path, key) if plain else f"{holder}: {spell(key)}"
    return Fault(where, f"{where} is no known key{nearest(key, known)}; {which}{holder} takes {', '.join(known)}")


def _deref(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def _allowed(node: Mapping[str, Any]) -> str | list[str]:
    """Say what a node of a JSON schema allows: the words of a table, or a phrase."""
    if "anyOf" in node:
        parts = [_allowed(part) for part in node["anyOf"]]
        if any(isinstance(part, list) for part in parts):
            return [word for part in parts for word in (part if isinstance(part, list) else part.split(" or "))]
        return " or ".join(str(part) for part in parts)
    if "enum" in node or "const" in node:
        return [str(word) for word in node.get("enum", (node.get("const"),))]
    if "discriminator" in node or "properties" in node:
        return "a section with keys of its own"
    kind = {
        "integer": "an integer", "number": "a finite number", "string": "a text that is not empty",
        "boolean": "true or false", "null": "null",
    }[node["type"]]
    bounds = {
        "minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below",
    }
    return " ".join([kind, " and ".join(f"{word} {node[key]}" for key, word in bounds.items() if key in node)]).strip()


def contradictions(values: Mapping[str, Any], rules: Iterable[Rule], wrong: set[str]) -> list[Fault]:
    """Give the rules that sound values break; a rule that reads a wrong or missing field is not asked."""
    found = []
    for rule in rules:
        if any(field == path or path.startswith(f"{field}.") for field in rule.fields for path in wrong):
            continue
        if any(path and field.startswith(f"{path}.") for field in rule.fields for path in wrong):
            continue
        if rule.broken(*[_select(values, field) for field in rule.fields]):
            found.append(Fault(rule.fields[0], rule.text))
    return found


def _select(values: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values
