"""Opens vLLM 0.32 with a worker's configuration. The only module that imports vLLM.

`AsyncLLM` and `SamplingParams` are public API of vLLM. Its step statistics are not, so only
`StepStats.note` reads them.
"""

from collections.abc import Mapping
from typing import Any

import vllm
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from services.worker.config import WorkerConfig
from services.worker.errors import WorkerError
from services.worker.ipc import EngineReady
from services.worker.vllm_engine.adapter import OpenedEngine
from services.worker.vllm_engine.arguments import arguments_of
from services.worker.vllm_engine.budget import kv_bytes, parameter_bytes
from services.worker.vllm_engine.running import StepStats

VERSION = "0.32"
NULL_BLOCKS = 1
"""Blocks that vLLM reserves as the null block."""


class VllmUnusable(WorkerError):
    """vLLM cannot serve with this configuration."""


def open_engine(config: WorkerConfig) -> OpenedEngine:
    """Load the model; returns when it can serve, after a minute or more.

    Raises:
        WorkerError: if vLLM's version is not `VERSION`, or vLLM rejects the model or a setting.
    """
    if not vllm.__version__.startswith(f"{VERSION}."):
        raise VllmUnusable(
            f"vLLM {vllm.__version__} is installed, but {VERSION} is required; run `tideserve"
            " engine install vllm`"
        )
    parameters = parameter_bytes(config.model_dir, config.dtype)
    room_bytes = kv_bytes(config.memory_bytes, parameters)
    try:
        settings = _arguments(config, room_bytes).create_engine_config()
    except ValueError as error:
        raise VllmUnusable(f"vLLM rejected the model or a setting: {error}") from error
    context_tokens = settings.model_config.max_model_len
    stats = StepStats()
    engine = AsyncLLM.from_vllm_config(
        settings,
        stat_loggers=[lambda _config, _index: _StepLogger(stats)],
        disable_log_stats=True,
    )
    facts = _facts(config, settings, parameters, room_bytes, context_tokens)
    return OpenedEngine(
        engine,
        facts,
        stats,
        to_params,
        invalid=(VLLMClientError,),
        transient=(EngineGenerateError,),
        dead=(EngineDeadError,),
        by_priority=settings.scheduler_config.policy == "priority",
    )


def to_params(arguments: Mapping[str, Any]) -> SamplingParams:
    """vLLM's sampling parameters; raises VLLMClientError if they are invalid."""
    parameters = dict(arguments)
    grammar = parameters.pop("structured_outputs", None)
    if grammar is not None:
        parameters["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(output_kind=RequestOutputKind.DELTA, **parameters)


def _arguments(config: WorkerConfig, room_bytes: int) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        **arguments_of(config, room_bytes),
        # The gateway applies the model's generation_config.json itself.
        generation_config="vllm",
        # The gateway checks grammars with llguidance, so vLLM must use the same dialect.
        structured_outputs_config=StructuredOutputsConfig(backend="guidance"),
        trust_remote_code=False,
        disable_log_stats=True,
    )


def _facts(
    config: WorkerConfig,
    settings: VllmConfig,
    parameters: int,
    room_bytes: int,
    context_tokens: int,
) -> EngineReady:
    """The loaded model and its memory; without transfer addresses, so the worker never merges."""
    cache = settings.cache_config
    blocks = (cache.num_gpu_blocks or 0) - NULL_BLOCKS
    longest = settings.model_config.max_model_len
    return EngineReady(
        max_model_len=min(longest, blocks * cache.block_size),
        context_tokens=context_tokens,
        vocab_size=settings.model_config.get_vocab_size(),
        block_size=cache.block_size,
        kv_blocks_total=blocks,
        kv_block_bytes=room_bytes // (blocks + NULL_BLOCKS),
        budget_bytes=config.memory_bytes,
        parameter_bytes=parameters,
        staging_bytes=0,
    )


class _StepLogger(StatLoggerBase):
    """Passes vLLM's statistics of a step to `StepStats`."""

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._stats.note(scheduler_stats, iteration_stats)

    def log_engine_initialized(self) -> None:
        """Log nothing, as `EngineReady` has the same information."""
