"""Maps a worker's configuration to engine arguments of vLLM. Pure: does not import vLLM."""

import json
from collections.abc import Mapping
from typing import Any

from services.core.service import Service, ServiceClass
from services.worker.adapter_settings import AdapterSettings
from services.worker.config import WorkerConfig

RANK_MAX = 2**20
"""Ranks are clamped to this, so that a rank never outweighs the service class."""
FIT_MODEL_LEN = -1
"""Value of `max_model_len` with which vLLM uses the longest sequence that fits its KV cache."""


def arguments_of(config: WorkerConfig, room_bytes: int) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`, with `room_bytes` of KV cache on all devices.

    Without `engine_args`, which vLLM's parser has to read first; see `flags_of`.
    """
    planner = config.planner
    return _adapter_arguments(config.adapters) | {
        "model": str(config.model_dir),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len or FIT_MODEL_LEN,
        "block_size": planner.block_size,
        # vLLM's argument is for each device.
        "kv_cache_memory_bytes": room_bytes // config.engine_devices,
        "max_num_seqs": planner.max_running,
        "max_num_batched_tokens": planner.max_batch_tokens,
        # Never force prefix caching on: vLLM knows which models do not support it.
        "enable_prefix_caching": None if planner.prefix_caching else False,
        "scheduling_policy": "priority" if planner.scheduling.uses_classes else "fcfs",
    }


def _adapter_arguments(adapters: AdapterSettings) -> dict[str, Any]:
    if not adapters.adapter_slots:
        return {}
    return {
        "enable_lora": True,
        "max_loras": adapters.adapter_slots,
        # The worker unloads adapters itself, so vLLM needs no further ones in host memory.
        "max_cpu_loras": adapters.adapter_slots,
        "max_lora_rank": adapters.adapter_rank_max,
    }


def flags_of(engine_args: Mapping[str, Any]) -> list[str]:
    """`engine_args` as flags of vLLM's command line; null leaves an argument out."""
    flags: list[str] = []
    for name, value in engine_args.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                pass
            case True:
                flags.append(f"--{flag}")
            case False:
                flags.append(f"--no-{flag}")
            case list():
                flags += [f"--{flag}", *map(_text, value)]
            case _:
                flags.append(f"--{flag}={_text(value)}")
    return flags


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def priority_of(service: Service) -> int:
    """vLLM's priority of a request, the lowest first; has no effect with vLLM's policy `fcfs`."""
    return 3 * RANK_MAX * list(ServiceClass).index(service.service_class) + max(
        -RANK_MAX, min(service.rank, RANK_MAX)
    )


def class_of(priority: int) -> ServiceClass:
    """The service class of a request with vLLM's `priority`, the inverse of `priority_of`."""
    return list(ServiceClass)[round(priority / (3 * RANK_MAX))]
