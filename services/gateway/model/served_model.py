"""What the gateway knows of the model that it serves: names, sizes, tokenizer, template."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.core.request import EOS_IDS_MAX
from services.gateway.api.fields import INT32_MAX
from services.gateway.api.generation import REPETITION_PENALTY_MAX, TEMPERATURE_MAX
from services.gateway.keys.principal import Principal
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.sampling import PLAIN_DEFAULTS, SamplingDefaults
from services.gateway.model.template import load_template, read_json
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.tools.format import AUTO


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model folder, read once; no weights."""

    name: str
    tokenizer: Tokenizer
    # None without a chat template.
    chat: ChatModel | None
    # Rows of the output layer: every token id is below it.
    vocab_size: int
    # Longest sequence that the model was made for; workers may hold less.
    context_tokens: int
    eos_ids: frozenset[int]
    # For fields that clients leave out.
    defaults: SamplingDefaults = PLAIN_DEFAULTS
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which clients may call the model, its own first."""
        return (self.name, *self.aliases)

    def allowed_names(self, principal: Principal) -> tuple[str, ...]:
        """The `names` that the bearer of a key may use; every list of models shows these."""
        return tuple(name for name in self.names if principal.may_use(name, self.name))


def load_model(
    name: str,
    model_dir: Path,
    aliases: Sequence[str] = (),
    *,
    own_defaults: bool = True,
    tool_format: str = AUTO,
    reasoning_format: str = AUTO,
) -> ServedModel:
    """Read a model folder. `own_defaults`: whether its generation_config.json has a say in them.

    The formats are those of calls and reasoning, or "auto".

    Raises:
        ConfigError: if the folder or a needed file is missing or unusable.
    """
    if not model_dir.is_dir():
        raise ConfigError(f"the model folder {model_dir} is not there; correct 'model_dir'")
    config = read_json(model_dir / "config.json")
    if not config:
        raise ConfigError(f"{model_dir} has no config.json; give the folder of a model")
    tokenizer = Tokenizer.load(model_dir)
    vocab_size = config.get("vocab_size", tokenizer.size)
    context_tokens = config.get("max_position_embeddings")
    if not isinstance(vocab_size, int) or not isinstance(context_tokens, int):
        raise ConfigError(
            f"{model_dir / 'config.json'} lacks vocab_size or max_position_embeddings; "
            "give the folder of a decoder-only model"
        )
    template, chat = load_template(model_dir), None
    if template is not None:
        chat = ChatModel(template, tokenizer.added_tokens, tool_format, reasoning_format)
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        chat=chat,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        eos_ids=_eos_ids(model_dir, config, tokenizer, vocab_size),
        defaults=_defaults(model_dir, vocab_size) if own_defaults else PLAIN_DEFAULTS,
        aliases=tuple(alias for alias in dict.fromkeys(aliases) if alias != name),
    )


def _defaults(model_dir: Path, vocab_size: int) -> SamplingDefaults:
    """The defaults of generation_config.json; raises ConfigError if one is impossible."""
    path = model_dir / "generation_config.json"
    given = read_json(path)
    ranges = {
        "temperature": (0.0, TEMPERATURE_MAX),
        "top_p": (math.ulp(0.0), 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (math.ulp(0.0), REPETITION_PENALTY_MAX),
        "top_k": (-1, math.inf),
        "max_new_tokens": (1, INT32_MAX),
    }
    found: dict[str, Any] = {}
    for key, (low, high) in ranges.items():
        value = given.get(key)
        if value is None:
            continue
        whole = key in ("top_k", "max_new_tokens")
        kinds = (int,) if whole else (int, float)
        if type(value) not in kinds or not low <= value <= high:
            raise ConfigError(
                f"{key} in {path} is {value!r}, which cannot be served; correct it, or set"
                " 'generation_config' to none"
            )
        found[key] = value
    if (max_tokens := found.pop("max_new_tokens", None)) is not None:
        found["max_tokens"] = max_tokens
    if "top_k" in found:
        found["top_k"] = min(max(0, found["top_k"]), vocab_size)
    return SamplingDefaults(**found)


def _eos_ids(
    model_dir: Path, config: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int
) -> frozenset[int]:
    """End-of-sequence ids: of the generation settings, else the model, else the tokenizer.

    Raises:
        ConfigError: if there are too many.
    """
    for source in (read_json(model_dir / "generation_config.json"), config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = frozenset(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)
        if len(found) > EOS_IDS_MAX:
            raise ConfigError(
                f"{model_dir} names {len(found)} end-of-sequence tokens, but {EOS_IDS_MAX} are the "
                "most; correct 'eos_token_id' in its generation_config.json or config.json"
            )
        if found:
            return found
    token = read_json(model_dir / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    found_id = tokenizer.token_id(text) if isinstance(text, str) else None
    return frozenset() if found_id is None else frozenset({found_id})
