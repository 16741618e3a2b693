"""Where a service's configuration comes from: environment over file over default.

environment   TIDESERVE__<KEY>: two underscores, because Kubernetes sets TIDESERVE_PORT=tcp://… in
              every pod beside a Service of the name `tideserve`
file          the YAML file given with --config, if any
secret files  a secret key may be given as `<key>_file`, in the file or the environment: the file's
              content without its trailing line end is the value
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from services.common.config import (
    Given,
    build,
    check_keys,
    field_names,
    format_size,
    plain,
    read_yaml,
)
from services.common.errors import ConfigError

T = TypeVar("T")

PREFIX = "TIDESERVE__"
MASK = "***"
DEFAULT = "default"
_FILE = "_file"
# A password or a key; more is a wrong path.
_SECRET_BYTES_MAX = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Settings(Generic[T]):
    """A configuration, and for each key where its value comes from."""

    config: T
    origins: Mapping[str, str]


def variable(key: str) -> str:
    """The environment variable of a key."""
    return PREFIX + key.upper()


def secret_names(cls: type[Any]) -> list[str]:
    """Keys of the dataclass `cls` that are never shown and may be given as a file."""
    return [one.name for one in dataclasses.fields(cls) if one.metadata.get("secret")]


def load_settings(cls: type[T], path: Path | None, environment: Mapping[str, str]) -> Settings[T]:
    """The configuration `cls` of this process.

    Raises:
        ConfigError: on what cannot be used; names the variable or key, the place and the remedy.
    """
    given = given_in_file(cls, path) if path is not None else {}
    given |= _from_environment(cls, environment)
    place = f"add it to {path}" if path is not None else "give a file that has it with --config"
    config = build(cls, given, lambda key: f"missing; set {variable(key)}, or {place}")
    names = field_names(cls)
    return Settings(config, {key: given[key].place if key in given else DEFAULT for key in names})


def describe(settings: Settings[Any]) -> str:
    """The configuration as YAML, secrets masked, each key with its origin as a comment."""
    lines = []
    for one in dataclasses.fields(settings.config):
        value = getattr(settings.config, one.name)
        if one.metadata.get("secret") and value is not None:
            value = MASK
        elif one.metadata.get("size") and value is not None:
            value = format_size(value)
        origin = " ".join(settings.origins[one.name].split())
        lines.append(f"{one.name}: {_inline(plain(value))}  # {origin}\n")
    return "".join(lines)


def given_in_file(cls: type[Any], path: Path) -> dict[str, Given]:
    """What the YAML file at `path` gives of the dataclass `cls`, secrets from their files included.

    Raises:
        ConfigError: on an unknown key, or a file that cannot be read.
    """
    return given_in_mapping(cls, read_yaml(path), str(path))


def given_in_mapping(cls: type[Any], data: Mapping[str, Any], source: str) -> dict[str, Given]:
    """The same of a mapping; `source` names the place in errors. Raises ConfigError."""
    secrets = secret_names(cls)
    check_keys(data, [*field_names(cls), *(name + _FILE for name in secrets)], source)
    given = {key: Given(value, source) for key, value in data.items()}
    for name in secrets:
        _take_secret_file(given, name, f"'{name}'", f"'{name + _FILE}'", source)
    return given


def _from_environment(cls: type[Any], environment: Mapping[str, str]) -> dict[str, Given]:
    secrets = secret_names(cls)
    keys = [*field_names(cls), *(name + _FILE for name in secrets)]
    known = {variable(key): key for key in keys}
    given = {}
    for name, text in environment.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            close = difflib.get_close_matches(name.removeprefix(PREFIX).lower(), keys, n=1)
            hint = f"did you mean {variable(close[0])}?" if close else "--help lists those known"
            raise ConfigError(f"unknown variable {name} in the environment; {hint}")
        given[known[name]] = Given(text, f"the environment ({name})", text=True)
    for name in secrets:
        own, file = variable(name), variable(name + _FILE)
        _take_secret_file(given, name, own, file, "the environment")
    return given


def _take_secret_file(given: dict[str, Given], name: str, own: str, file: str, source: str) -> None:
    """Replace `<name>_file` in `given` by the content of that file."""
    pointer = given.pop(name + _FILE, None)
    if pointer is None:
        return
    if name in given:
        raise ConfigError(f"{source} gives both {own} and {file}; take one out")
    if not isinstance(pointer.value, str) or not pointer.value:
        raise ConfigError(f"{file} in {source} must be the path of a file")
    given[name] = Given(
        _read_secret(Path(pointer.value), file), f"{pointer.value} ({file})", text=True
    )


def _read_secret(path: Path, file: str) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(_SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}, which {file} names: {error.strerror}") from error
    if len(content) > _SECRET_BYTES_MAX:
        raise ConfigError(f"{path}, which {file} names, is too large for a secret; correct it")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}, which {file} names, is not text in UTF-8") from None
    return text.removesuffix("\n").removesuffix("\r")


def _inline(value: Any) -> str:
    """The value as YAML on one line."""
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=2**31, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
