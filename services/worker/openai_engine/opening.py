"""Opens an upstream server with a worker's configuration."""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

from services.common.clock import monotonic_s
from services.worker.config import WorkerConfig
from services.worker.ipc import EngineReady
from services.worker.openai_engine.client import UpstreamClient
from services.worker.openai_engine.completions import Completions, UpstreamDialect
from services.worker.openai_engine.engine import StreamLimits, UpstreamEngine
from services.worker.openai_engine.errors import (
    UpstreamBusy,
    UpstreamChanged,
    UpstreamFailed,
    UpstreamLost,
    UpstreamRefused,
    UpstreamUnusable,
)
from services.worker.openai_engine.link import UpstreamLink
from services.worker.openai_engine.llama_cpp import LlamaCpp
from services.worker.openai_engine.model_limits import ModelLimits, read_model_limits
from services.worker.openai_engine.probe import ProbeOptions, UpstreamApi, UpstreamFacts, probe
from services.worker.openai_engine.retokenizer import Retokenizer
from services.worker.openai_engine.text_completions import TextCompletions
from services.worker.upstream_url import UPSTREAM_KEY
from services.worker.vllm_engine.adapter import OpenedEngine
from services.worker.vllm_engine.running import EngineState, StepStats

RETRY_S = 1.0
REPORT_MARGIN_S = 2.0
"""The engine gives up this long before its servicer would, so that its error is shown."""
FIRST_TIMEOUTS = 10
"""A first token may take this many times as long as later ones: it waits in the server's queue."""

log = logging.getLogger(__name__)


async def open_upstream(config: WorkerConfig) -> OpenedEngine:
    """Wait for the upstream server and probe it, for up to `start_timeout_s`.

    Raises:
        WorkerError: if the server does not answer in time, or cannot be used.
    """
    # It logs each call at level info.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    model = read_model_limits(config.model_dir)
    client = UpstreamClient(config.upstream_url, _key(config.upstream_key_file))
    ask = partial(probe, client, _options(config, model))
    facts = await _first_facts(client, ask, config.start_timeout_s)
    log.info("%s serves %s", config.upstream_url, facts.summary)
    stats = StepStats()
    most = config.planner.max_running
    state = EngineState(
        upstream=f"{client.url}: {facts.summary}",
        sequences_max=min(facts.slots or most, most),
        resumes=facts.resumes,
    )
    wait_s, silent_s = config.upstream_wait_s, config.engine_unready_s
    link = UpstreamLink(client, facts, ask, stats, state, silent_s, wait_s)
    event_s = config.engine_dead_s
    limits = StreamLimits(FIRST_TIMEOUTS * event_s, event_s, wait_s)
    dialect = _dialect(facts, config.model_dir, model)
    return OpenedEngine(
        UpstreamEngine(client, dialect, link, facts, model, limits),
        _ready(config, facts, model),
        stats,
        to_params=dict,
        invalid=(UpstreamRefused,),
        transient=(UpstreamFailed, UpstreamLost, UpstreamBusy),
        dead=(UpstreamChanged,),
        by_priority=facts.priorities,
        name="the upstream server",
        state=state,
        watch=link.run,
    )


def _options(config: WorkerConfig, model: ModelLimits) -> ProbeOptions:
    return ProbeOptions(
        model=config.upstream_model,
        model_name=config.model_name,
        kv_tokens=config.upstream_kv_tokens,
        max_running=config.planner.max_running,
        block_size=config.planner.block_size,
        context_tokens=config.max_model_len or model.context_tokens,
    )


async def _first_facts(client: UpstreamClient, ask: Any, timeout_s: float) -> UpstreamFacts:
    deadline_s = monotonic_s() + max(RETRY_S, timeout_s - REPORT_MARGIN_S)
    while True:
        try:
            facts: UpstreamFacts = await ask()
        except (UpstreamLost, UpstreamBusy) as error:
            if monotonic_s() >= deadline_s:
                raise UpstreamUnusable(
                    f"{client.url} did not serve within {timeout_s:g} s ({error}); start the"
                    " server, or correct 'upstream_url'"
                ) from error
            log.info("waiting for %s: %s", client.url, error)
            await asyncio.sleep(RETRY_S)
        else:
            return facts


def _dialect(facts: UpstreamFacts, folder: Path, model: ModelLimits) -> UpstreamDialect:
    """How requests are sent to a server; raises ModelError without a tokenizer that it needs."""
    if facts.api is UpstreamApi.TOKEN_IDS:
        return Completions(facts.model)
    retokenizer = Retokenizer(folder)
    if facts.api is UpstreamApi.LLAMA_CPP:
        return LlamaCpp(retokenizer, model.eos_ids)
    takes_ids = facts.api is UpstreamApi.TEXT
    return TextCompletions(facts.model, retokenizer, takes_ids, model.eos_ids, model.bos_id)


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text(errors="replace").strip()
    except OSError as error:
        raise UpstreamUnusable(
            f"cannot read {path}, given as 'upstream_key_file': {error.strerror}"
        ) from error
    if not UPSTREAM_KEY.fullmatch(key):
        raise UpstreamUnusable(
            f"{path}, given as 'upstream_key_file', is not a key in printable ASCII without spaces"
            " and line breaks; write only the key into it"
        )
    return key


def _ready(config: WorkerConfig, facts: UpstreamFacts, model: ModelLimits) -> EngineReady:
    """The server's limits; no memory of this machine and no transfer addresses."""
    kv_tokens = facts.block_size * facts.kv_blocks
    longest = min(facts.max_model_len, kv_tokens)
    return EngineReady(
        max_model_len=min(longest, config.max_model_len or longest),
        context_tokens=facts.max_model_len,
        vocab_size=model.vocab_size,
        block_size=facts.block_size,
        kv_blocks_total=facts.kv_blocks,
        kv_block_bytes=0,
        budget_bytes=0,
        parameter_bytes=0,
        staging_bytes=0,
    )
