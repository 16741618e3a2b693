"""Loads a service's configuration: the environment over a file over defaults.

environment   TIDESERVE__<KEY>, with two underscores: Kubernetes sets TIDESERVE_PORT=tcp://… in
              every pod beside a Service named `tideserve`
file          the YAML file of --config, if any
secret files  a secret key may be set as `<key>_file`, in the file or the environment: the value is
              the content of the file at that path, without its trailing newline
"""

import difflib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from services.common.config import (
    SourcedValue,
    build,
    given_in,
    plain,
    read_yaml,
    take_secret_files,
)
from services.common.errors import ConfigError
from services.common.setting import known_keys, settings_of, values_of
from services.common.size import format_size

T = TypeVar("T")

PREFIX = "TIDESERVE__"
MASK = "***"
DEFAULT = "default"
_HELP_WIDTH = 96


@dataclass(frozen=True, slots=True)
class Settings(Generic[T]):
    """A configuration, and the source of each value by key."""

    config: T
    origins: Mapping[str, str]


def variable(key: str) -> str:
    """The environment variable of a key."""
    return PREFIX + key.upper()


def load_settings(cls: type[T], path: Path | None, environment: Mapping[str, str]) -> Settings[T]:
    """The configuration `cls` of this process.

    Raises:
        ConfigError: on invalid input; names the variable or key, its source and the remedy.
    """
    given = given_in(cls, read_yaml(path), str(path)) if path is not None else {}
    # Merged last: the environment takes precedence.
    given |= _from_environment(cls, environment)
    remedy = f"add it to {path}" if path is not None else "give a file that has it with --config"
    config = build(cls, given, lambda key: f"missing; set {variable(key)}, or {remedy}")
    origins = {key: given[key].source if key in given else DEFAULT for key in settings_of(cls)}
    return Settings(config, origins)


def _from_environment(cls: type[Any], environment: Mapping[str, str]) -> dict[str, SourcedValue]:
    known = {variable(key): key for key in known_keys(cls)}
    given = {}
    for name, text in environment.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            key = name.removeprefix(PREFIX).lower()
            close = difflib.get_close_matches(key, known.values(), n=1)
            hint = f"did you mean {variable(close[0])}?" if close else "--help lists those known"
            raise ConfigError(f"unknown variable {name} in the environment; {hint}")
        given[known[name]] = SourcedValue(text, f"the environment ({name})", text=True)
    take_secret_files(cls, given, "the environment", variable)
    return given


def describe(settings: Settings[Any]) -> str:
    """The configuration as YAML with masked secrets, and each value's source as a comment."""
    values, lines = values_of(settings.config), []
    for key, setting in settings_of(type(settings.config)).items():
        value = values[key]
        if setting.secret and value is not None:
            value = MASK
        elif setting.metadata.get("size") and value is not None:
            value = format_size(value)
        origin = " ".join(settings.origins[key].split())
        lines.append(f"{key}: {_inline(plain(value))}  # {origin}\n")
    return "".join(lines)


def _inline(value: Any) -> str:
    """The value as YAML on a single line."""
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=2**31, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def help_text(cls: type[Any]) -> str:
    """The text of --help about the keys of the configuration `cls`, without expert keys."""
    lines = [
        "keys of the file; each may also be set in the environment, which takes precedence, as",
        "TIDESERVE__<KEY>, such as TIDESERVE__LOG_LEVEL=debug:",
    ]
    for setting in settings_of(cls).values():
        if setting.metadata.get("expert"):
            continue
        default = setting.default_text if setting.required else f"default: {setting.default_text}"
        lines.append(f"  {setting.key}  ({setting.values_text}; {default})")
        text = setting.help + (f" Or in a file: {setting.key}_file." if setting.secret else "")
        lines += textwrap.wrap(text, _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
