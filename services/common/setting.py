"""Describes the keys of a configuration dataclass: allowed values and defaults, also as text."""

import dataclasses
import mmap
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.common.size import format_size

# Memory is mapped in pages, so chunk sizes are multiples of this.
PAGE_BYTES = mmap.PAGESIZE
SECRET_FILE_SUFFIX = "_file"
REQUIRED = "required"
_KINDS: Mapping[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    dict[str, Any]: "a mapping, in the file only",
    tuple[dict[str, Any], ...]: "a list of mappings, in the environment as JSON",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A key of a configuration; `default` is `dataclasses.MISSING` if a value is required.

    `kinds` are the types that a value may have. `metadata` is that of the field, from
    `services.core.setting`; its entry `elsewhere` describes another default in other contexts.
    """

    key: str
    kinds: tuple[Any, ...]
    default: Any
    metadata: Mapping[str, Any]

    @property
    def secret(self) -> bool:
        """Whether the value must never be shown, and may be set as the path of a file."""
        return bool(self.metadata.get("secret"))

    @property
    def required(self) -> bool:
        """Whether a value is required."""
        return self.default is dataclasses.MISSING

    @property
    def help(self) -> str:
        """The description, or ""."""
        return str(self.metadata.get("help", ""))

    @property
    def values_text(self) -> str:
        """The allowed values, such as "1 to 65536" or "cpu, cuda or cuda:N"."""
        if "options" in self.metadata:
            return ", ".join(self.metadata["options"])
        if "pattern" in self.metadata:
            return str(self.metadata["pattern"][1])
        if "range" in self.metadata:
            step = self.metadata["multiple_of"]
            if step == PAGE_BYTES:
                # The page size differs between machines, but the reference must not.
                return f"whole pages, up to {format_size(self.metadata['range'][1])}"
            return range_text(self.metadata) + (f", a multiple of {step}" if step != 1 else "")
        kinds = [kind for kind in self.kinds if kind is not types.NoneType]
        return " or ".join(_KINDS.get(kind, "a list, with commas") for kind in kinds)

    @property
    def default_text(self) -> str:
        """The default, such as "1GiB", "none" or "required"."""
        value = self.default
        if (text := self.metadata.get("default_text")) is not None:
            return str(text)
        if self.required:
            return REQUIRED
        if value is None:
            return "none"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int | float):
            is_size = value and self.metadata.get("size")
            text = format_size(int(value)) if is_size else number_text(value)
            elsewhere = self.metadata.get("elsewhere")
            return f"{text}; {elsewhere}" if elsewhere else text
        return str(value) or "empty"


def settings_of(cls: type[Any], defaults: Any = None) -> Mapping[str, Setting]:
    """The keys of the dataclass `cls` and of its nested dataclasses.

    In declaration order, but the keys of a nested dataclass precede all keys declared before it.
    `defaults` is an instance with the defaults of fields that have no factory; None: the fields'
    own defaults.
    """
    hints = typing.get_type_hints(cls)
    settings: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        default = getattr(defaults, field.name) if defaults is not None else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        hint = hints[field.name]
        if field.metadata.get("nested"):
            settings = {**settings_of(hint, default), **settings}
        elif not field.metadata.get("computed"):
            kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            key = key_of(field)
            settings[key] = Setting(key, kinds, default, field.metadata)
    return settings


def key_of(field: dataclasses.Field[Any]) -> str:
    """The configuration key of a field that is neither nested nor computed."""
    return str(field.metadata.get("key", field.name))


def known_keys(cls: type[Any]) -> list[str]:
    """The keys of the dataclass `cls`, including `<key>_file` of each secret."""
    settings = settings_of(cls)
    return [
        *settings,
        *(key + SECRET_FILE_SUFFIX for key, setting in settings.items() if setting.secret),
    ]


def values_of(config: Any) -> dict[str, Any]:
    """The value of each key in a configuration."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("nested"):
            values |= values_of(value)
        elif not field.metadata.get("computed"):
            values[key_of(field)] = value
    return values


def is_str_enum(kind: Any) -> bool:
    """Whether a type is a string enum."""
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def range_text(metadata: Mapping[str, Any]) -> str:
    """The range of a field as text, such as "4MiB to 1TiB"."""
    low, high = map(format_size if metadata.get("size") else number_text, metadata["range"])
    return f"{low} to {high}"


def number_text(value: float) -> str:
    """The number as text, without a zero fraction."""
    return str(int(value)) if value == int(value) else str(value)
