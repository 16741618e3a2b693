"""Opens vLLM with a worker's configuration. The only module that imports vLLM.

`AsyncLLM` and `SamplingParams` are public API of vLLM. Its step statistics are not, so only
`StepStats.note` reads them, and `probe.fault` checks them.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import vllm
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

from services.worker.config import WorkerConfig
from services.worker.errors import WorkerError
from services.worker.ipc import EngineReady
from services.worker.vllm_engine.adapter import OpenedEngine
from services.worker.vllm_engine.adapter_slots import AdapterSlots
from services.worker.vllm_engine.arguments import arguments_of, flags_of
from services.worker.vllm_engine.budget import kv_bytes, parameter_bytes
from services.worker.vllm_engine.probe import UsedPart, fault
from services.worker.vllm_engine.running import (
    IterationNumbers,
    PrefixLookups,
    SchedulerNumbers,
    StepStats,
)

USED_PARTS = (
    UsedPart("SchedulerStats", SchedulerStats, SchedulerNumbers.__annotations__),
    UsedPart("IterationStats", IterationStats(), IterationNumbers.__annotations__),
    UsedPart("PrefixCacheStats", PrefixCacheStats, PrefixLookups.__annotations__),
    UsedPart("StatLoggerBase.record", StatLoggerBase.record, ("scheduler_stats", "engine_idx")),
    UsedPart("AsyncLLM", AsyncLLM, ("from_vllm_config", "generate", "abort")),
    UsedPart(
        "AsyncLLM.from_vllm_config", AsyncLLM.from_vllm_config, ("stat_loggers", "vllm_config")
    ),
    UsedPart("SamplingParams", SamplingParams, ("structured_outputs", "output_kind", "detokenize")),
    UsedPart("AsyncEngineArgs", AsyncEngineArgs, ("kv_cache_memory_bytes", "add_cli_args")),
)
ADAPTER_PARTS = (
    UsedPart("AsyncLLM", AsyncLLM, ("add_lora", "remove_lora")),
    UsedPart("AsyncLLM.generate", AsyncLLM.generate, ("lora_request",)),
    UsedPart("LoRARequest", LoRARequest, ("lora_name", "lora_int_id", "lora_path")),
)
"""Parts that are used only with `adapter_slots`."""
NULL_BLOCKS = 1
"""Blocks that vLLM reserves as the null block."""


class VllmUnusable(WorkerError):
    """vLLM cannot serve with this configuration."""


def open_engine(config: WorkerConfig) -> OpenedEngine:
    """Load the model; returns when it can serve, after a minute or more.

    Raises:
        WorkerError: if this version of vLLM lacks a part that is used, or vLLM rejects the model or
            a setting.
    """
    slots = config.adapters.adapter_slots
    parts = (*USED_PARTS, *(ADAPTER_PARTS if slots else ()))
    if (reason := fault(vllm.__version__, parts)) is not None:
        raise VllmUnusable(reason)
    parsed = parsed_arguments(config.vllm_arguments)
    parameters = parameter_bytes(config.model_dir, config.dtype)
    room_bytes = kv_bytes(config.memory_bytes, parameters)
    try:
        settings = _arguments(config, room_bytes, parsed).create_engine_config()
    except ValueError as error:
        reason = _on_a_line(str(error))
        raise VllmUnusable(f"vLLM rejected the model or a setting: {reason}") from error
    context_tokens = settings.model_config.max_model_len
    stats = StepStats()
    engine = AsyncLLM.from_vllm_config(
        settings,
        stat_loggers=[lambda _config, _index: _StepLogger(stats)],
        disable_log_stats=True,
    )
    facts = _facts(config, settings, parameters, room_bytes, context_tokens)
    dead = (EngineDeadError,)
    adapters = None
    if slots:
        adapters = AdapterSlots(engine, slots, config.adapters.root_folders, LoRARequest, dead)
    return OpenedEngine(
        engine,
        facts,
        stats,
        to_params,
        invalid=(VLLMClientError,),
        transient=(EngineGenerateError,),
        dead=dead,
        adapters=adapters,
        by_priority=settings.scheduler_config.policy == "priority",
    )


def to_params(arguments: Mapping[str, Any]) -> SamplingParams:
    """vLLM's sampling parameters; raises VLLMClientError if they are invalid."""
    parameters = dict(arguments)
    grammar = parameters.pop("structured_outputs", None)
    if grammar is not None:
        parameters["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(output_kind=RequestOutputKind.DELTA, **parameters)


def _on_a_line(text: str) -> str:
    """An error of vLLM, which may be one of pydantic's with a link in its last line."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if not line.startswith("For further information"))


class _Parser(FlexibleArgumentParser):
    """vLLM's parser of the command line, which raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise VllmUnusable(f"vLLM rejected 'engine_args': {message}; correct it")


def parsed_arguments(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as vLLM's own parser reads them, checks included.

    Raises:
        VllmUnusable: if vLLM refuses an argument; with vLLM's words.
    """
    parser = _Parser(prog="engine_args", add_help=False, allow_abbrev=False)
    parsed = vars(AsyncEngineArgs.add_cli_args(parser).parse_args(flags_of(engine_args)))
    unknown = [name for name in engine_args if name not in parsed]
    if unknown:
        raise VllmUnusable(f"vLLM has no engine argument {', '.join(unknown)}; correct it")
    return {name: parsed[name] for name, value in engine_args.items() if value is not None}


def _arguments(config: WorkerConfig, room_bytes: int, parsed: Mapping[str, Any]) -> AsyncEngineArgs:
    arguments = arguments_of(config, room_bytes) | {
        # The gateway applies the model's generation_config.json itself.
        "generation_config": "vllm",
        # The gateway checks grammars with llguidance, so vLLM must use the same dialect.
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance"),
        "trust_remote_code": False,
        "disable_log_stats": True,
    }
    return AsyncEngineArgs(**arguments | dict(parsed))


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
        adapter_slots=config.adapters.adapter_slots,
        adapter_rank_max=config.adapters.adapter_rank_max if config.adapters.adapter_slots else 0,
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
