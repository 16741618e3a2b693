"""A worker's configuration in the words of vLLM's engine arguments (0.32). Pure: no vLLM here."""

from typing import Any

from services.worker.config import WorkerConfig

FIT_MODEL_LEN = -1
"""vLLM's word for the longest sequence that its KV cache holds."""


def arguments_of(config: WorkerConfig, room_bytes: int) -> dict[str, Any]:
    """What a configuration says of vLLM's `AsyncEngineArgs`, with `room_bytes` of KV.

    The cache of prefixes is never forced on: vLLM knows which models cannot have one.
    """
    return {
        "model": str(config.model_dir),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len or FIT_MODEL_LEN,
        "block_size": config.block_size,
        "kv_cache_memory_bytes": room_bytes,
        "max_num_seqs": config.max_running,
        "max_num_batched_tokens": config.max_batch_tokens,
        "scheduling_policy": "priority",
        "enable_prefix_caching": None if config.prefix_caching else False,
    }
