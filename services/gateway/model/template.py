"""Reads the chat template of a model folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The text of a chat template, and the special tokens that are variables of the template."""

    source: str
    special_tokens: Mapping[str, str]


def load_template(model_dir: Path) -> TemplateSource | None:
    """Read the chat template of a model folder; None if the model has none.

    Raises:
        ConfigError: if a file cannot be read.
    """
    settings = read_json(model_dir / "tokenizer_config.json")
    source: Any = settings.get("chat_template")
    # The file is the newer convention and takes precedence over tokenizer_config.json.
    path = model_dir / "chat_template.jinja"
    if path.exists():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    if isinstance(source, list):
        # A list has several named templates; "default" is for chats without tools.
        named = {item.get("name"): item.get("template") for item in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return TemplateSource(source, _special_tokens(settings))


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if the file does not exist.

    Raises:
        ConfigError: if the file cannot be read or holds no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}; fetch the model again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object; fetch the model again")
    return data


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens
