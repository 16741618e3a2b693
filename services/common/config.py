"""Parses and checks the configuration of a service, into a frozen dataclass.

Unknown and missing keys, and values with the wrong type or out of range, are errors that name the
key, its source (such as the file) and the remedy. A secret key may be set as `<key>_file`, the path
of a file that contains the secret.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from services.common.errors import ConfigError
from services.common.setting import (
    PAGE_BYTES,
    SECRET_FILE_SUFFIX,
    Setting,
    is_str_enum,
    key_of,
    known_keys,
    range_text,
    settings_of,
    values_of,
)
from services.common.size import parse_size_bytes

T = TypeVar("T")

KEPT = dataclasses.MISSING
# Largest file with a secret; a larger file is probably a wrong path.
_SECRET_BYTES_MAX = 64 * 2**10
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True}
_TRUTHS |= {"false": False, "no": False, "off": False, "0": False}
# The last two occur for a value that does not match its tag, such as "!!bool perhaps".
_YAML_FAILURES = (yaml.YAMLError, ValueError, RecursionError, KeyError, AttributeError)
# A quotation from the text: neither a kind of token ('<scalar>') nor a single character.
_NAME = re.compile(r"(?: for the tag|:)? ['\"](?!<|.['\"])")
_READERS: Mapping[type, tuple[Callable[[str], Any], str]] = {
    bool: (lambda text: _TRUTHS[text.lower()], "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
}


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: if the file cannot be read or does not contain a mapping.
    """
    try:
        return parse_yaml(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error


def parse_yaml(text: bytes | str, source: str) -> dict[str, Any]:
    """The mapping in a YAML text; `source` names the text in errors. Raises ConfigError."""
    try:
        data = yaml.safe_load(text)
    except _YAML_FAILURES as error:
        # `from None`: the error quotes the text, which may contain secrets.
        raise ConfigError(f"{source} is not valid YAML{_where_and_why(error)}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{source} must contain a mapping of keys to values")
    return data


def _where_and_why(error: Exception) -> str:
    """Position and problem of a YAML error, without quoting the text."""
    mark = getattr(error, "problem_mark", None)
    position = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    # A problem may end with a name from the text, such as that of an alias or a tag.
    problem = _NAME.split(getattr(error, "problem", None) or "")[0]
    return f"{position}: {problem or 'it contains an invalid value or character'}"


def like(cls: type[Any], key: str, *, default: Any = KEPT, **changes: Any) -> Any:
    """A dataclass field with the checks and the default of `key` of the configuration `cls`.

    `default` overrides the default, `changes` its metadata.
    """
    setting = settings_of(cls)[key]
    if default is KEPT:
        default = setting.default
    else:
        changes = {"default_text": None, **changes}
    metadata = {**setting.metadata, "key": None, **changes}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    return dataclasses.field(default=default, metadata=metadata, repr=not setting.secret)


@dataclasses.dataclass(frozen=True, slots=True)
class SourcedValue:
    """A configured value and its source; `text`: the source has only text, such as a variable."""

    value: Any = dataclasses.field(repr=False)
    source: str
    text: bool = False


def from_mapping(cls: type[T], data: Mapping[str, Any], source: str) -> T:
    """An instance of the dataclass `cls` from `data`; `source` names the data in errors.

    Raises:
        ConfigError: on an unknown or missing key, a wrong type or a value out of range.
    """
    return build(cls, given_in(cls, data, source), lambda key: f"missing in {source}; add it")


def given_in(cls: type[Any], data: Mapping[str, Any], source: str) -> dict[str, SourcedValue]:
    """The values in `data`, with secrets read from their files; `source` as in `from_mapping`.

    Raises:
        ConfigError: on an unknown key, or a file that cannot be read.
    """
    check_keys(data, known_keys(cls), source)
    given = {key: SourcedValue(value, source) for key, value in data.items()}
    take_secret_files(cls, given, source)
    return given


def check_keys(data: Iterable[str], known: Sequence[str], source: str) -> None:
    """Raise ConfigError for a key that is not `known`; `source` names the data in errors."""
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
            raise ConfigError(f"unknown configuration key '{key}' in {source}; {hint}")


def take_secret_files(
    cls: type[Any],
    given: dict[str, SourcedValue],
    source: str,
    shown: Callable[[str], str] = lambda key: f"'{key}'",
) -> None:
    """Replace `<name>_file` of each secret in `given` by the content of that file.

    Raises:
        ConfigError: if the file cannot be read, or the secret itself is given as well.
    """
    for name in (key for key, setting in settings_of(cls).items() if setting.secret):
        pointer = given.pop(name + SECRET_FILE_SUFFIX, None)
        if pointer is None:
            continue
        own, file = shown(name), shown(name + SECRET_FILE_SUFFIX)
        if name in given:
            raise ConfigError(f"{source} gives both {own} and {file}; remove either")
        if not isinstance(pointer.value, str) or not pointer.value:
            raise ConfigError(f"{file} in {source} must be the path of a file")
        secret = _read_secret(Path(pointer.value), file)
        given[name] = SourcedValue(secret, f"{pointer.value} ({file})", text=True)


def _read_secret(path: Path, file: str) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(_SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}, given as {file}: {error.strerror}") from error
    if len(content) > _SECRET_BYTES_MAX:
        raise ConfigError(f"{path}, given as {file}, is too large for a secret; correct the path")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}, given as {file}, is not UTF-8 text") from None
    return text.removesuffix("\n").removesuffix("\r")


def build(cls: type[T], given: Mapping[str, SourcedValue], missing: Callable[[str], str]) -> T:
    """An instance of the dataclass `cls`; `missing(key)` describes how to set a missing key.

    A static method `defaults_for` of `cls` returns defaults that depend on other values.

    Raises:
        ConfigError: on a missing key, a wrong type or a value out of range.
    """
    values = read_values(cls, given)
    # Explicit values take precedence over derived defaults.
    if (defaults_for := getattr(cls, "defaults_for", None)) is not None:
        values = defaults_for(values) | values
    for key, setting in settings_of(cls).items():
        if key not in values and setting.required:
            raise ConfigError(f"configuration key '{key}' is {missing(key)}")
    try:
        return cls(**_arguments(cls, None, values))
    except ValueError as error:  # a dataclass of core rejects its values
        raise ConfigError(str(error)) from error


def read_values(cls: type[Any], given: Mapping[str, SourcedValue]) -> dict[str, Any]:
    """The checked values of those keys in `given` that the dataclass `cls` has.

    Raises:
        ConfigError: on a wrong type or a value out of range.
    """
    settings = settings_of(cls)
    return {key: _read(settings[key], raw) for key, raw in given.items() if key in settings}


def _arguments(cls: type[Any], defaults: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments of `cls` from the values of keys; nested dataclasses are rebuilt."""
    arguments = {}
    for field in dataclasses.fields(cls):
        if field.metadata.get("nested"):
            inner: Any = field.default if defaults is None else getattr(defaults, field.name)
            own = _arguments(type(inner), inner, values)
            arguments[field.name] = dataclasses.replace(inner, **own)
        elif key_of(field) in values and not field.metadata.get("computed"):
            arguments[field.name] = values[key_of(field)]
    return arguments


def dump(config: Any) -> str:
    """YAML that `from_mapping` reads back to an equal dataclass; secrets are omitted."""
    settings = settings_of(type(config))
    values = values_of(config).items()
    text: str = yaml.safe_dump({k: plain(v) for k, v in values if not settings[k].secret})
    return text


def plain(value: Any) -> Any:
    """The value converted to types of YAML."""
    if isinstance(value, Path | StrEnum):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _read(setting: Setting, given: SourcedValue) -> Any:
    for kind in setting.kinds:
        if dataclasses.is_dataclass(kind) and isinstance(given.value, Mapping):
            return from_mapping(
                cast("type[Any]", kind), given.value, f"section '{setting.key}' of {given.source}"
            )
    where = f"'{setting.key}' in {given.source}"
    try:
        value = (_from_text if given.text else _converted)(given.value, setting)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    # An empty secret is probably a mistake, and would turn authentication off.
    if setting.secret and isinstance(value, str) and not value.strip():
        raise ConfigError(f"{where} is empty; give the secret, or leave it out")
    enum = next((kind for kind in setting.kinds if is_str_enum(kind)), None)
    accepted = tuple(map(_plain_type, setting.kinds))
    # bool is a subclass of int: refuse true where a number is required.
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        # Never show a secret in a message, not even an invalid secret.
        shown = "not usable" if setting.secret else repr(value)
        wanted = " or ".join("list" if kind is tuple else kind.__name__ for kind in accepted)
        raise ConfigError(f"{where} is {shown}, but must be of type {wanted}")
    if value is None:
        return None
    if (allowed := _refusal(value, setting.metadata)) is not None:
        shown = f"'{value}'" if isinstance(value, str) else value
        raise ConfigError(f"{where} is {shown}, but must be {allowed}")
    return value if enum is None else enum(value)


def _plain_type(kind: Any) -> Any:
    """The type of a field's values in YAML."""
    if is_str_enum(kind):
        return str
    return dict if dataclasses.is_dataclass(kind) else typing.get_origin(kind) or kind


def _refusal(value: Any, metadata: Mapping[str, Any]) -> str | None:
    """Description of the allowed values if `value` is not one of them, else None."""
    if "range" in metadata:
        low, high = metadata["range"]
        if not low <= value <= high:
            return range_text(metadata)
        step = metadata["multiple_of"]
        if step != 1 and value % step:
            return f"a multiple of {f'the page size, {step} bytes' if step == PAGE_BYTES else step}"
    if "pattern" in metadata and not metadata["pattern"][0].fullmatch(value):
        return str(metadata["pattern"][1])
    if "options" in metadata and value not in metadata["options"]:
        return f"one of {', '.join(metadata['options'])}"
    return None


def _from_text(text: str, setting: Setting) -> Any:
    """Parse the text of a value; an empty text is None, if allowed. Raises ConfigError."""
    if not text and types.NoneType in setting.kinds and not setting.secret:
        return None
    if setting.metadata.get("size"):
        return parse_size_bytes(text)
    for kind in setting.kinds:
        if typing.get_origin(kind) is tuple:
            if typing.get_args(kind)[0] is not str:
                return _mappings_in(text)
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if kind in _READERS:
            read, wanted = _READERS[kind]
            try:
                return read(text.strip())
            except (ValueError, KeyError):
                raise ConfigError(f"'{text}' is not {wanted}") from None
        if kind in (str, Path) or is_str_enum(kind):
            return text if is_str_enum(kind) else kind(text)
    raise ConfigError("this key can be given only in a YAML file")


def _mappings_in(text: str) -> tuple[Any, ...]:
    """The entries of a list of mappings, as JSON or YAML. Raises ConfigError."""
    try:
        entries = yaml.safe_load(text)
    except _YAML_FAILURES as error:
        raise ConfigError(f"it is no valid JSON{_where_and_why(error)}") from None
    if not isinstance(entries, list):
        raise ConfigError("it must be a list of mappings, as JSON")
    return tuple(entries)


def _converted(value: Any, setting: Setting) -> Any:
    """Convert a YAML value: text to paths and sizes, lists to tuples, integers to floats.

    YAML reads `on` and `off` without quotes as booleans.
    """
    if isinstance(value, bool):
        word, options = "on" if value else "off", setting.metadata.get("options", ())
        return word if word in options else value
    if isinstance(value, str):
        if setting.metadata.get("size"):
            return parse_size_bytes(value)
        return Path(value) if Path in setting.kinds else value
    if float in setting.kinds and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return tuple(value) if isinstance(value, list) else value
