"""The models of `tideserve up --models FILE`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.config import check_keys, from_mapping, like, read_yaml
from services.common.errors import ConfigError
from services.core.setting import mapping, number, option
from services.gateway.config import GatewayConfig
from services.gateway.model.settings import MODELS_MAX, ModelSettings
from services.worker.config import WorkerConfig

WORKERS_MAX = 64
_OF_GATEWAY = (
    *("aliases", "quota_weight", "generation_config"),
    *("tool_format", "reasoning_format", "user_special_tokens"),
)
_OF_WORKERS = ("max_model_len", "block_size", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """An entry of the file. None: as the option of `tideserve up`, else the service's default."""

    model: str = option(help="Hub id, with @REVISION to pin it, or local folder with safetensors.")
    name: str | None = like(GatewayConfig, "model_name")
    workers: int = number(1, "Number of workers.", minimum=1, maximum=WORKERS_MAX)
    memory: int | None = like(WorkerConfig, "memory_bytes", default=None)
    max_model_len: int | None = like(WorkerConfig, "max_model_len", default=None)
    block_size: int | None = like(WorkerConfig, "block_size", default=None)
    dtype: str | None = like(WorkerConfig, "dtype", default=None)
    aliases: tuple[str, ...] = like(ModelSettings, "aliases")
    quota_weight: float | None = like(ModelSettings, "quota_weight", default=None)
    generation_config: str | None = like(ModelSettings, "generation_config", default=None)
    tool_format: str | None = like(ModelSettings, "tool_format", default=None)
    reasoning_format: str | None = like(ModelSettings, "reasoning_format", default=None)
    user_special_tokens: bool | None = like(ModelSettings, "user_special_tokens", default=None)
    worker: dict[str, Any] = mapping("More keys of the model's workers.")


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A listed model with its name and folder."""

    listed: ListedModel
    name: str
    dir: Path

    def gateway_entry(self) -> dict[str, Any]:
        """The entry of the gateway's `models`."""
        entry = {"name": self.name, "dir": str(self.dir), "expected_workers": self.listed.workers}
        return entry | _given(self.listed, _OF_GATEWAY)

    def worker_keys(self, memory_bytes: int) -> dict[str, Any]:
        """The keys of each of its workers; `memory_bytes`: of workers whose entry has none."""
        keys: dict[str, Any] = {"model_name": self.name, "model_dir": str(self.dir)}
        keys["memory_bytes"] = self.listed.memory or memory_bytes
        return keys | _given(self.listed, _OF_WORKERS)


def _given(listed: ListedModel, keys: Sequence[str]) -> dict[str, Any]:
    values = {key: getattr(listed, key) for key in keys}
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value not in (None, ())
    }


def read_model_list(path: Path) -> tuple[ListedModel, ...]:
    """The models of the file at `path`. Raises ConfigError."""
    data = read_yaml(path)
    check_keys(data, ["models"], str(path))
    entries = data.get("models")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MODELS_MAX:
        raise ConfigError(
            f"{path} must have 'models', a list of 1 to {MODELS_MAX} models, such as"
            " models: [{model: Qwen/Qwen2.5-0.5B-Instruct, workers: 2}]"
        )
    models = []
    for position, entry in enumerate(entries, 1):
        source = f"model {position} of {path}"
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"{source} is {entry!r:.80}, but must be a mapping with 'model', such as"
                " {model: ./folder}"
            )
        models.append(from_mapping(ListedModel, entry, source))
    if (total := sum(model.workers for model in models)) > WORKERS_MAX:
        raise ConfigError(
            f"{path} has {total} workers, but at most {WORKERS_MAX} can be; lower 'workers'"
        )
    return tuple(models)
