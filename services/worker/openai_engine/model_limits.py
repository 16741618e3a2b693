"""Reads the limits of a model from its config.json, of which a worker has no weights."""

from pathlib import Path
from typing import Any

import msgspec

from services.worker.errors import ModelError


class ModelLimits(msgspec.Struct, frozen=True):
    """What a worker needs of the model's config.json."""

    vocab_size: int
    context_tokens: int
    eos_ids: tuple[int, ...]
    bos_id: int | None


def read_model_limits(folder: Path) -> ModelLimits:
    """Sizes in config.json, which may nest them in `text_config`; raises ModelError."""
    path = folder / "config.json"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        text = content | (content.get("text_config") or {})
        eos = text.get("eos_token_id")
        return ModelLimits(
            vocab_size=int(text["vocab_size"]),
            context_tokens=int(text["max_position_embeddings"]),
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
            bos_id=text.get("bos_token_id"),
        )
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path} does not name vocab_size and max_position_embeddings ({error}); choose the"
            " folder of the model that the upstream server serves"
        ) from error
