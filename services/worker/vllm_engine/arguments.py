"""A worker's configuration in the words of vLLM's engine arguments (0.32). Pure: no vLLM here."""

from typing import Any

from services.core.service import Service, ServiceClass
from services.worker.config import WorkerConfig

RANK_MAX = 2**20
"""Ranks beyond it are alike: no rank takes a request out of its class."""
FIT_MODEL_LEN = -1
"""vLLM's word for the longest sequence that its KV cache holds."""


def arguments_of(config: WorkerConfig, room_bytes: int) -> dict[str, Any]:
    """What a configuration says of vLLM's `AsyncEngineArgs`, with `room_bytes` of KV.

    The cache of prefixes is never forced on: vLLM knows which models cannot have one.
    """
    planner = config.planner
    return {
        "model": str(config.model_dir),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len or FIT_MODEL_LEN,
        "block_size": planner.block_size,
        "kv_cache_memory_bytes": room_bytes,
        "max_num_seqs": planner.max_running,
        "max_num_batched_tokens": planner.max_batch_tokens,
        "enable_prefix_caching": None if planner.prefix_caching else False,
        "scheduling_policy": "priority" if planner.scheduling.knows_classes else "fcfs",
    }


def priority_of(service: Service) -> int:
    """vLLM's priority of a request, which counts only with the policy `priority`; smaller first."""
    return 3 * RANK_MAX * list(ServiceClass).index(service.service_class) + max(
        -RANK_MAX, min(service.rank, RANK_MAX)
    )
