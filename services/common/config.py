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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True}
_TRUTHS |= {"false": False, "no": False, "off": False, "0": False}
# The last two for a value under a tag that it does not fit, such as "!!bool perhaps".
_YAML_FAILURES = (yaml.YAMLError, ValueError, RecursionError, KeyError, AttributeError)
# A quotation other than that of a token's kind ('<scalar>') or of one character.
_NAME = re.compile(r"(?: for the tag|:)? ['\"](?!<|.['\"])")
_READERS: Mapping[type, tuple[Callable[[str], Any], str]] = {
    bool: (lambda text: _TRUTHS[text.lower()], "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
}


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    secret: bool = False,
    *,
    factory: Callable[[], Any] | None = None,
    **more: Any,
) -> Any:
    """A dataclass field without further checks.

    `help` is one sentence for the command line and the reference. A `secret` may also be given as
    a file (key `<name>_file`) and is never shown. `factory` makes the default when it is needed.
    Of `more`, which all kinds of fields take, `default_text` tells people what the default is where
    the value itself does not, and `panel` is the heading under which a command shows the option.
    """
    metadata = {"help": help, "secret": secret, **more}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata, repr=not secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def number(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    minimum: float,
    maximum: float,
    multiple_of: int = 1,
    **more: Any,
) -> Any:
    """A dataclass field whose value must lie in [minimum, maximum], on a grid if that is given."""
    return option(default, help, range=(minimum, maximum), multiple_of=multiple_of, **more)


def tcp_port(default: Any, help: str) -> Any:
    """A `number` that is a TCP port; 0: any free one."""
    return number(default, help, minimum=0, maximum=65535)


def size(default: Any = dataclasses.MISSING, help: str = "", **more: Any) -> Any:
    """A `number` of bytes, which may also be written with a unit, such as 1GiB."""
    return number(default, help, size=True, **more)


def choice(default: Any, options: Iterable[str], help: str = "", **more: Any) -> Any:
    """A dataclass field whose value must be one of `options`."""
    return option(default, help, options=tuple(options), **more)


def mapping(help: str) -> Any:
    """A dataclass field that holds a mapping; empty by default."""
    return option(help=help, factory=dict, default_text="none")


def device_name(default: Any, help: str = "") -> Any:
    """A dataclass field whose value must name a device; whether this machine has it is open."""
    return option(default, help, pattern=_DEVICE)


def like(
    cls: type[Any],
    key: str,
    *,
    default: Any = dataclasses.MISSING,
    help: str | None = None,
    default_text: str | None = None,
    **more: Any,
) -> Any:
    """A dataclass field with the checks of field `key` of the dataclass `cls`.

    Its help and default, too, unless they are given. `more` is added to the metadata.
    """
    field = field_of(cls, key)
    changes: dict[str, Any] = more | ({} if help is None else {"help": help})
    if default is dataclasses.MISSING:
        default = field.default
    else:
        changes["default_text"] = default_text
    metadata = dict(field.metadata) | changes
    return dataclasses.field(default=default, metadata=metadata, repr=field.repr)


def field_of(cls: type[Any], key: str) -> dataclasses.Field[Any]:
    """The field `key` of the dataclass `cls`."""
    return next(field for field in dataclasses.fields(cls) if field.name == key)


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


def format_size(size_bytes: int) -> str:
    """The shortest text from which `parse_size_bytes` reads the same number of bytes."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _SIZE_UNITS[unit.lower()]
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return str(size_bytes)


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
    except _YAML_FAILURES as error:
        # From None: the error itself quotes the text, in which there may be secrets.
        raise ConfigError(f"{source} is not valid YAML{_where_and_why(error)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{source} must hold a mapping of keys to values")
    return data


def _where_and_why(error: Exception) -> str:
    """Place and problem, without a word of the text that could not be read."""
    mark = getattr(error, "problem_mark", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    # A problem may end in a name out of the text, such as that of an alias or a tag.
    problem = _NAME.split(getattr(error, "problem", None) or "")[0]
    return f"{place}: {problem or 'a value or a character in it cannot be read'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A value and where it was given. `text`: from a place that knows only text."""

    value: Any = dataclasses.field(repr=False)
    place: str
    text: bool = False


def from_mapping(cls: type[T], data: Mapping[str, Any], source: str) -> T:
    """An instance of the dataclass `cls` from `data`; `source` names the place in errors.

    Raises:
        ConfigError: on an unknown or missing key, a wrong type or a value out of range.
    """
    check_keys(data, field_names(cls), source)
    given = {key: Given(value, source) for key, value in data.items()}
    return build(cls, given, lambda key: f"missing in {source}; add it")


def check_values(cls: type[Any], data: Mapping[str, Any], source: str) -> None:
    """Check the value of each key of `data` that the dataclass `cls` has; `source` as above.

    Raises:
        ConfigError: on a wrong type or a value out of range.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in data:
            given = Given(data[field.name], source)
            _checked(field.name, given, hints[field.name], field.metadata)


def field_names(cls: type[Any]) -> list[str]:
    """Keys of the dataclass `cls`, in the order of their declaration."""
    return [field.name for field in dataclasses.fields(cls)]


def check_keys(data: Iterable[str], known: Sequence[str], source: str) -> None:
    """Refuse a key that is not `known`; `source` names the place. Raises ConfigError."""
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
            raise ConfigError(f"unknown configuration key '{key}' in {source}; {hint}")


def build(cls: type[T], given: Mapping[str, Given], missing: Callable[[str], str]) -> T:
    """An instance of the dataclass `cls`. `missing` says where a key without a value may be given.

    Raises:
        ConfigError: on a missing key, a wrong type or a value out of range.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = field.name
        if name in given:
            values[name] = _checked(name, given[name], hints[name], field.metadata)
        elif not has_default(field):
            raise ConfigError(f"configuration key '{name}' is {missing(name)}")
    return cls(**values)


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether the key may be left out."""
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def dump(config: Any) -> str:
    """YAML that `from_mapping` reads back to an equal dataclass; secrets are left out."""
    secret = {one.name for one in dataclasses.fields(config) if one.metadata.get("secret")}
    values = dataclasses.asdict(config)
    text: str = yaml.safe_dump({key: plain(v) for key, v in values.items() if key not in secret})
    return text


def plain(value: Any) -> Any:
    """The value in the types that YAML has."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types that a field's annotation allows."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _checked(name: str, given: Given, hint: Any, metadata: Mapping[str, Any]) -> Any:
    kinds = kinds_of(hint)
    where = f"'{name}' in {given.place}"
    try:
        read = _from_text if given.text else _converted
        value = read(given.value, kinds, metadata)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    # An empty secret is one that somebody forgot to fill in: none would open the door.
    if metadata.get("secret") and isinstance(value, str) and not value.strip():
        raise ConfigError(f"{where} is empty; give the secret, or leave it out")
    # A message must not show a secret, not even an unusable one.
    shown = "not usable" if metadata.get("secret") else repr(value)
    accepted = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        wanted = " or ".join(kind.__name__ for kind in accepted)
        raise ConfigError(f"{where} is {shown}, but must be of type {wanted}")
    if value is None:
        return None
    if "range" in metadata:
        low, high = metadata["range"]
        if not low <= value <= high:
            raise ConfigError(f"{where} is {value}, but must be {range_text(metadata)}")
        step = metadata["multiple_of"]
        if step != 1 and value % step:
            grid = f"the page size, {step} bytes" if step == PAGE_BYTES else step
            raise ConfigError(f"{where} is {value}, but must be a multiple of {grid}")
    if "pattern" in metadata and not metadata["pattern"][0].fullmatch(value):
        raise ConfigError(f"{where} is '{value}', but must be {metadata['pattern'][1]}")
    if "options" in metadata and value not in metadata["options"]:
        options = ", ".join(metadata["options"])
        raise ConfigError(f"{where} is '{value}', but must be one of {options}")
    return value


def range_text(metadata: Mapping[str, Any]) -> str:
    """The range of a field in words, such as "4MiB to 1TiB"."""
    low, high = metadata["range"]
    if metadata.get("size"):
        return f"{format_size(low)} to {format_size(high)}"
    return f"{number_text(low)} to {number_text(high)}"


def number_text(value: float) -> str:
    """The number without a fraction that says nothing."""
    return str(int(value)) if value == int(value) else str(value)


def _from_text(text: str, kinds: tuple[Any, ...], metadata: Mapping[str, Any]) -> Any:
    """The value that a text stands for, by the field's type; an empty text is none, if allowed.

    Raises:
        ConfigError: if it is not of that type.
    """
    if not text and types.NoneType in kinds and not metadata.get("secret"):
        return None
    if metadata.get("size"):
        return parse_size_bytes(text)
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if kind in _READERS:
            read, wanted = _READERS[kind]
            try:
                return read(text.strip())
            except (ValueError, KeyError):
                raise ConfigError(f"'{text}' is not {wanted}") from None
        if kind in (str, Path):
            return kind(text)
    raise ConfigError("this key can only be given in a YAML file")


def _converted(value: Any, kinds: tuple[Any, ...], metadata: Mapping[str, Any]) -> Any:
    """YAML has no paths, tuples or sizes and writes whole floats as integers."""
    if metadata.get("size") and isinstance(value, str):
        return parse_size_bytes(value)
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
