"""Settings of each served model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.core.setting import choice, number, option, served_name
from services.gateway.tools.format import (
    AUTO,
    REASONING_FORMAT_ALIASES,
    TOOL_FORMAT_ALIASES,
    ReasoningFormat,
    ToolFormat,
)

MODELS_MAX = 64
TOOL_FORMATS = (AUTO, *(form.value for form in ToolFormat), *TOOL_FORMAT_ALIASES)
REASONING_FORMATS = (AUTO, *(form.value for form in ReasoningFormat), *REASONING_FORMAT_ALIASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The settings of a served model."""

    name: str = served_name("Model name in requests.")
    dir: Path = option(help="Folder with config.json and tokenizer.json.")
    aliases: tuple[str, ...] = option((), "Further model names in requests.")
    expected_workers: int | None = number(
        None,
        "Number of workers of each model required before /ready first succeeds (at most"
        " `expected_wait_s`). Afterwards, or if unset, /ready succeeds whenever a request can be"
        " scheduled.",
        minimum=1,
        maximum=100_000,
    )
    generation_config: str = choice(
        "auto",
        ("auto", "none"),
        "Sampling defaults: auto uses the model's generation_config.json, none only the defaults of"
        " the OpenAI API.",
    )
    tool_format: str = choice(
        AUTO,
        TOOL_FORMATS,
        "Format of the model's tool calls; auto: detect it from the template and tokenizer.",
    )
    reasoning_format: str = choice(
        AUTO,
        REASONING_FORMATS,
        "Format of the model's reasoning; auto: detect it from the template and tokenizer.",
    )
    user_special_tokens: bool = option(
        True,
        "Whether special tokens in the text of users and tools become these tokens, as in vLLM;"
        " otherwise chats encode them as text.",
    )

    quota_weight: float = number(
        1.0,
        "Tokens of a quota that a token of the model costs.",
        minimum=0.001,
        maximum=1000,
    )

    def __post_init__(self) -> None:
        for alias in self.aliases:
            if not isinstance(alias, str) or not alias:
                raise ConfigError(
                    f"an alias of the model '{self.name}' is {alias!r}, but must be a text;"
                    " quote it"
                )


def models_of(
    entries: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> tuple[ModelSettings, ...]:
    """The models of the setting `models`; `defaults` by key of `ModelSettings`.

    Raises:
        ConfigError: on an invalid entry, too many, or a name of two models.
    """
    if len(entries) > MODELS_MAX:
        raise ConfigError(
            f"'models' has {len(entries)} models, but at most {MODELS_MAX} can be; remove some"
        )
    models = []
    for position, entry in enumerate(entries, 1):
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"model {position} of 'models' is {entry!r:.80}, but must be a mapping, such as"
                " {name: qwen, dir: /models/qwen}"
            )
        source = f"model {position} of 'models'"
        models.append(from_mapping(ModelSettings, {**defaults, **entry}, source))
    _check_names(models)
    return tuple(models)


def _check_names(models: Sequence[ModelSettings]) -> None:
    """Raise ConfigError if two models have a name or an alias in common."""
    owners: dict[str, ModelSettings] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if owners.setdefault(name, model) is not model:
                raise ConfigError(f"two models of 'models' have the name '{name}'; rename either")
