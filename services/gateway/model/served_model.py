"""Loads the served model's names, sizes, tokenizer, chat template and defaults from its folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.core.request import (
    CONTEXT_TOKENS_MAX,
    EOS_IDS_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    VOCAB_MAX,
)
from services.gateway.api.fields import INT32_MAX
from services.gateway.api.generation import TEMPERATURE_MAX
from services.gateway.keys.principal import Principal
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.renderer import TemplateRenderer
from services.gateway.model.sampling import PLAIN_DEFAULTS, SamplingDefaults
from services.gateway.model.template import load_template, read_json
from services.gateway.model.trial import try_model
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.tools.format import AUTO


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Contents of a model folder, without the weights; read once at the start."""

    name: str
    tokenizer: Tokenizer
    # None if the model has no chat template.
    chat: ChatModel | None
    renderer: TemplateRenderer | None
    # Rows of the output layer, which may exceed the tokenizer's size; token ids are below it.
    vocab_size: int
    # Longest sequence that the model supports; a worker's KV cache may hold less.
    context_tokens: int
    eos_ids: frozenset[int]
    # Values of sampling fields that clients omit.
    defaults: SamplingDefaults = PLAIN_DEFAULTS
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use for the model, its own name first."""
        return (self.name, *self.aliases)

    def allowed_names(self, principal: Principal) -> tuple[str, ...]:
        """The `names` that `principal` may use, which are also the models that it can list."""
        return tuple(name for name in self.names if principal.may_use(name, self.name))


def load_model(
    name: str,
    model_dir: Path,
    aliases: Sequence[str] = (),
    *,
    own_defaults: bool = True,
    tool_format: str = AUTO,
    reasoning_format: str = AUTO,
    user_tokens: bool = True,
) -> ServedModel:
    """Read a model folder. `own_defaults`: use the defaults of its generation_config.json.

    `tool_format` and `reasoning_format` are names of formats, or "auto". `user_tokens`: whether
    users may write special tokens; see `TokenCuts`.

    Raises:
        ConfigError: if the folder or a needed file is missing or unusable.
    """
    if not model_dir.is_dir():
        raise ConfigError(f"the model folder {model_dir} does not exist; correct 'model_dir'")
    config = read_json(model_dir / "config.json")
    if not config:
        raise ConfigError(f"{model_dir} has no config.json; give the folder of a model")
    variables = try_model(model_dir)
    tokenizer = Tokenizer.load(model_dir)
    vocab_size = _size(model_dir, config, "vocab_size", VOCAB_MAX, tokenizer.size)
    tokenizer.limit_ids(vocab_size)
    context_tokens = _size(model_dir, config, "max_position_embeddings", CONTEXT_TOKENS_MAX)
    chat, renderer = None, None
    if (template := load_template(model_dir)) is not None:
        formats, tokens = (tool_format, reasoning_format), tokenizer.added_tokens
        cuts = None if user_tokens else tokenizer.token_cuts()
        chat = ChatModel(template.source, variables, tokens, *formats, cuts=cuts)
        hidden = cuts.mark if cuts is not None else None
        renderer = TemplateRenderer(template.source, template.special_tokens, hidden=hidden)
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        chat=chat,
        renderer=renderer,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        eos_ids=_eos_ids(model_dir, config, tokenizer, vocab_size),
        defaults=_defaults(model_dir, vocab_size) if own_defaults else PLAIN_DEFAULTS,
        aliases=tuple(alias for alias in dict.fromkeys(aliases) if alias != name),
    )


def _size(
    model_dir: Path, config: Mapping[str, Any], key: str, maximum: int, default: int | None = None
) -> int:
    """Read a size of config.json. Raises ConfigError."""
    value = config.get(key, default)
    # Not isinstance: a bool is no size.
    if type(value) is not int or not 1 <= value <= maximum:
        raise ConfigError(
            f"{model_dir / 'config.json'}: {key} is {value!r:.40}, but must be 1 to {maximum};"
            " correct config.json, or use another decoder-only model"
        )
    return value


def _defaults(model_dir: Path, vocab_size: int) -> SamplingDefaults:
    """Read the defaults of generation_config.json. Raises ConfigError if a value is invalid."""
    path = model_dir / "generation_config.json"
    settings = read_json(path)
    ranges = {
        "temperature": (0.0, TEMPERATURE_MAX),
        "top_p": (math.ulp(0.0), 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX),
        "top_k": (-1, math.inf),
        "max_new_tokens": (1, INT32_MAX),
    }
    defaults: dict[str, Any] = {}
    for key, (low, high) in ranges.items():
        value = settings.get(key)
        if value is None:
            continue
        whole = key in ("top_k", "max_new_tokens")
        # Not isinstance: a bool is no number here.
        kinds = (int,) if whole else (int, float)
        if type(value) not in kinds or not low <= value <= high:
            raise ConfigError(
                f"{key} in {path} is {value!r}, which is out of range; correct it, or set"
                " 'generation_config' to none"
            )
        defaults[key] = value
    if (max_tokens := defaults.pop("max_new_tokens", None)) is not None:
        defaults["max_tokens"] = max_tokens
    if "top_k" in defaults:
        # -1 and 0 both disable top-k.
        defaults["top_k"] = min(max(0, defaults["top_k"]), vocab_size)
    return SamplingDefaults(**defaults)


def _eos_ids(
    model_dir: Path, config: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int
) -> frozenset[int]:
    """Read the end-of-sequence token ids.

    Raises:
        ConfigError: if there are too many.
    """
    # generation_config.json takes precedence over config.json, this over tokenizer_config.json.
    for source in (read_json(model_dir / "generation_config.json"), config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        eos_ids = frozenset(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)
        if len(eos_ids) > EOS_IDS_MAX:
            raise ConfigError(
                f"{model_dir} names {len(eos_ids)} end-of-sequence tokens, but at most "
                f"{EOS_IDS_MAX} are supported; correct 'eos_token_id' in its "
                "generation_config.json or config.json"
            )
        if eos_ids:
            return eos_ids
    token = read_json(model_dir / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    eos_id = tokenizer.token_id(text) if isinstance(text, str) else None
    return frozenset() if eos_id is None else frozenset({eos_id})
