"""Checks the setting `engine_args`: arguments of vLLM that tideserve does not set itself."""

import re
from collections.abc import Mapping
from typing import Any

from services.common.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_OWN_SETTINGS: Mapping[str, str] = {
    "model": "model_dir",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "kv_cache_memory_bytes": "memory_bytes",
    "gpu_memory_utilization": "memory_bytes",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batch_tokens",
    "enable_prefix_caching": "prefix_caching",
    "scheduling_policy": "scheduling",
    "enable_lora": "adapter_slots",
    "max_loras": "adapter_slots",
    "max_lora_rank": "adapter_rank_max",
}
"""Arguments that have a setting of the worker."""
_FIXED: Mapping[str, str] = {
    "data_parallel_size": "start more workers instead",
    "max_cpu_loras": "the worker has as many adapters in memory as slots",
    "disable_log_stats": "the worker reports its load itself",
    "generation_config": "the gateway has a setting of this name",
    "structured_outputs_config": "the gateway checks grammars for this backend",
}
"""Arguments that cannot be changed, with the reason."""
_DEVICES = ("tensor_parallel_size", "pipeline_parallel_size")


def normalized(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """`engine_args` with underscores in names, as vLLM's Python API has them.

    Raises:
        ConfigError: if a name is invalid, repeated, or of an argument that tideserve sets.
    """
    names: dict[str, Any] = {}
    for given, value in engine_args.items():
        if not isinstance(given, str) or not _NAME.fullmatch(given):
            raise ConfigError(
                f"'engine_args' has the name {given!r:.64}; write names as in vLLM's documentation,"
                " without dashes in front, such as tensor_parallel_size"
            )
        name = given.replace("-", "_")
        if name in names:
            raise ConfigError(f"'engine_args' has {name} twice; remove one")
        if (setting := _OWN_SETTINGS.get(name)) is not None:
            raise ConfigError(
                f"'engine_args' has {name}, which the worker's '{setting}' sets; set that instead"
            )
        if (reason := _FIXED.get(name)) is not None:
            raise ConfigError(f"'engine_args' must not have {name}: {reason}; remove it")
        names[name] = value
    return names


def devices_of(engine_args: Mapping[str, Any]) -> int:
    """The number of devices of a worker: tensor parallel times pipeline parallel size.

    Raises:
        ConfigError: if a size is not a positive integer.
    """
    devices = 1
    for name in _DEVICES:
        size = engine_args.get(name, 1)
        # Not isinstance: a bool is no size.
        if type(size) is not int or size < 1:
            raise ConfigError(
                f"{name} in 'engine_args' is {size!r:.64}, but must be a positive integer;"
                " correct it"
            )
        devices *= size
    return devices
