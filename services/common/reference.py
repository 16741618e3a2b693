"""The options of a service in words, for `--help` and the reference: one row a key."""

import dataclasses
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config import (
    PAGE_BYTES,
    format_size,
    has_default,
    kinds_of,
    number_text,
    range_text,
)
from services.common.settings import variable

REQUIRED = "required"
_WORDS: Mapping[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    dict[str, Any]: "a mapping, in the file only",
}
_HELP_WIDTH = 96


@dataclass(frozen=True, slots=True)
class Row:
    """One key. `values`: what it may be, in words; `default`: "required" if there is none."""

    key: str
    variable: str
    values: str
    default: str
    help: str
    secret: bool


def rows(cls: type[Any]) -> list[Row]:
    """A row for each key of the configuration `cls`, in the order of their declaration."""
    hints = typing.get_type_hints(cls)
    return [
        Row(
            one.name,
            variable(one.name),
            values_text(hints[one.name], one.metadata),
            default_text(one),
            one.metadata.get("help", ""),
            bool(one.metadata.get("secret")),
        )
        for one in dataclasses.fields(cls)
    ]


def values_text(hint: Any, metadata: Mapping[str, Any]) -> str:
    """What a key may be, such as "1 to 65536" or "cpu, cuda or cuda:N"."""
    if "options" in metadata:
        return ", ".join(metadata["options"])
    if "pattern" in metadata:
        return str(metadata["pattern"][1])
    if "range" in metadata:
        step = metadata["multiple_of"]
        if step == PAGE_BYTES:
            # Pages differ between machines, and the reference must not.
            return f"whole pages, up to {format_size(metadata['range'][1])}"
        return range_text(metadata) + (f", a multiple of {step}" if step != 1 else "")
    kinds = [kind for kind in kinds_of(hint) if kind is not types.NoneType]
    return " or ".join(_WORDS.get(kind, "a list, with commas") for kind in kinds)


def default_text(field: dataclasses.Field[Any]) -> str:
    """The default of a key, such as "1GiB", "none" or "required"."""
    if not has_default(field):
        return REQUIRED
    if (text := field.metadata.get("default_text")) is not None:
        return str(text)
    value: Any = field.default
    return format_size(value) if value and field.metadata.get("size") else _value_text(value)


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return number_text(value)
    return str(value) or "empty"


def help_text(cls: type[Any]) -> str:
    """All keys of the configuration `cls` for a terminal."""
    lines = [
        "keys of the file; each may also be given in the environment, which wins, as",
        "TIDESERVE__<KEY>, such as TIDESERVE__LOG_LEVEL=debug:",
    ]
    for row in rows(cls):
        default = row.default if row.default == REQUIRED else f"default: {row.default}"
        lines.append(f"  {row.key}  ({row.values}; {default})")
        text = row.help + (f" Or as a file: {row.key}_file." if row.secret else "")
        lines += textwrap.wrap(text, _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
