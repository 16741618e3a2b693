"""Configuration: parsed once, strictly, into a frozen dataclass.

A key that the dataclass does not have, a missing key, a value of another type or outside its range
is an error that names the key, the place and the remedy.
"""

import dataclasses
import difflib
import math
import mmap
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from services.common.errors import ConfigError

T = TypeVar("T")

# Memory is mapped in pages, so the size of a chunk of it is a multiple of this.
PAGE_BYTES = mmap.PAGESIZE

_DEVICE = (re.compile(r"cpu|cuda(:\d{1,3})?"), "cpu, cuda or cuda:N")
_SIZE_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def option(default: Any = dataclasses.MISSING, help: str = "", secret: bool = False) -> Any:
    """A dataclass field without further checks.

    `help` is one sentence for the command line and the reference. A `secret` may also be given as
    a file (key `<name>_file`) and is never shown.
    """
    return dataclasses.field(default=default, metadata={"help": help, "secret": secret})


def number(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    minimum: float,
    maximum: float,
    multiple_of: int = 1,
) -> Any:
    """A dataclass field whose value must lie in [minimum, maximum], on a grid if that is given."""
    metadata = {"help": help, "range": (minimum, maximum), "multiple_of": multiple_of}
    return dataclasses.field(default=default, metadata=metadata)


def choice(default: Any, options: Iterable[str], help: str = "") -> Any:
    """A dataclass field whose value must be one of `options`."""
    return dataclasses.field(default=default, metadata={"help": help, "options": tuple(options)})


def device_name(default: str, help: str = "") -> Any:
    """A dataclass field whose value must name a device; whether this machine has it is open."""
    return dataclasses.field(default=default, metadata={"help": help, "pattern": _DEVICE})


def parse_size_bytes(text: str) -> int:
    """Bytes in a size such as "1GiB", "400 MiB" or "1500000".

    Raises:
        ConfigError: if the text is no size.
    """
    stripped = text.strip().lower()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = stripped[len(digits) :].strip()
    try:
        size = float(digits) * _SIZE_UNITS[unit]
    except (ValueError, KeyError):
        raise ConfigError(
            f"'{text}' is not a size; write a number and a unit, such as 1GiB or 400MiB"
        ) from None
    if not 0 < size < 2**60:
        raise ConfigError(f"the size '{text}' is out of range; it must be above 0 and below 1 EiB")
    return int(size)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: if the file cannot be read or holds something else than a mapping.
    """
    try:
        return parse_yaml(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error


def parse_yaml(text: bytes | str, source: str) -> dict[str, Any]:
    """The mapping in a YAML text; `source` names the place in errors. Raises ConfigError."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{source} must hold a mapping of keys to values")
    return data


def from_mapping(cls: type[T], data: Mapping[str, Any], source: str) -> T:
    """An instance of the dataclass `cls` from `data`; `source` names the place in errors.

    Raises:
        ConfigError: on an unknown or missing key, a wrong type or a value out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(fields)}"
            raise ConfigError(f"unknown configuration key '{key}' in {source}; {hint}")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _checked(name, data[name], hints[name], field.metadata, source)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"configuration key '{name}' is missing in {source}; add it")
    return cls(**values)


def load(cls: type[T], path: Path) -> T:
    """An instance of the dataclass `cls` from a YAML file; raises ConfigError."""
    return from_mapping(cls, read_yaml(path), str(path))


def dump(config: Any) -> str:
    """YAML that `from_mapping` reads back to an equal dataclass."""
    values = dataclasses.asdict(config)
    plain = {key: str(v) if isinstance(v, Path) else v for key, v in values.items()}
    text: str = yaml.safe_dump(
        {key: list(v) if isinstance(v, tuple) else v for key, v in plain.items()}
    )
    return text


def _checked(name: str, value: Any, hint: Any, metadata: Mapping[str, Any], source: str) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    value = _converted(value, kinds)
    accepted = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        wanted = " or ".join(kind.__name__ for kind in accepted)
        raise ConfigError(f"'{name}' in {source} is {value!r}, but must be of type {wanted}")
    if value is not None and "range" in metadata:
        low, high = metadata["range"]
        if not low <= value <= high:
            raise ConfigError(f"'{name}' in {source} is {value}, but must be {low} to {high}")
        step = metadata["multiple_of"]
        if step != 1 and value % step:
            raise ConfigError(f"'{name}' in {source} is {value}, but must be a multiple of {step}")
    if "pattern" in metadata and not metadata["pattern"][0].fullmatch(value):
        wanted = metadata["pattern"][1]
        raise ConfigError(f"'{name}' in {source} is '{value}', but must be {wanted}")
    if "options" in metadata and value not in metadata["options"]:
        options = ", ".join(metadata["options"])
        raise ConfigError(f"'{name}' in {source} is '{value}', but must be one of {options}")
    return value


def _converted(value: Any, kinds: tuple[Any, ...]) -> Any:
    """YAML has no paths or tuples and writes whole floats as integers."""
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, list):
        return tuple(value)
    return value
