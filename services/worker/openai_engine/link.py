"""Watches an upstream server: polls its load, and notices when it is gone, full or back.

A server that refuses connections is gone at once; one that does not answer is gone after a while.
Then all streams are cut, and requests wait here until it is back, unless other groups have room for
them. A server that comes back is probed again, because another model may run there.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from services.common.clock import monotonic_s
from services.common.timeouts import timeout, wait_set
from services.worker.openai_engine.client import UpstreamClient
from services.worker.openai_engine.errors import (
    UpstreamBusy,
    UpstreamChanged,
    UpstreamFailed,
    UpstreamLost,
    UpstreamUnusable,
)
from services.worker.openai_engine.metrics import UpstreamLoad, read_metrics
from services.worker.openai_engine.probe import METRICS_PATH, MODELS_PATH, UpstreamFacts
from services.worker.vllm_engine.running import EngineState, StepStats

POLL_S = 0.5
POLL_TIMEOUT_S = 2.0
_OK, _ERRORS = 200, 400

log = logging.getLogger(__name__)


class UpstreamLink:
    """The worker's connection to an upstream server with `facts`.

    `stats` and `state` are updated for the adapter. `silent_s`: time without an answer after which
    the server is gone. `wait_s`: longest wait of a request for a server that is gone or full.
    """

    def __init__(
        self,
        client: UpstreamClient,
        facts: UpstreamFacts,
        probe: Callable[[], Awaitable[UpstreamFacts]],
        stats: StepStats,
        state: EngineState,
        silent_s: float,
        wait_s: float,
    ) -> None:
        self._client = client
        self._facts = facts
        self._probe = probe
        self._stats = stats
        self._state = state
        self._silent_s = silent_s
        self._wait_s = wait_s
        self._answered_s = monotonic_s()
        self._ready = asyncio.Event()  # the server has answered since the last loss
        self._ready.set()
        self._poll_now = asyncio.Event()
        self._refused = 0  # requests that wait because the server had no room

    async def run(self) -> None:
        """Poll until cancelled; raises UpstreamChanged if the server comes back different."""
        while True:
            try:
                if not self._ready.is_set():
                    await self._probe_again()
                self._note(await self._load())
            except UpstreamLost as error:
                self._note_failure(error)
            else:
                self._note_answer()
            await wait_set(self._poll_now, POLL_S)

    def note_loss(self, error: UpstreamLost) -> None:
        """A stream was lost: requests start again once the server has answered a probe."""
        if self._ready.is_set():
            log.warning("a stream of %s was lost: %s", self._client.url, error)
        self._ready.clear()
        self._poll_now.set()

    def note_token(self) -> None:
        """A stream has a token: a server that only answers no polls in time is not gone."""
        self._answered_s = monotonic_s()

    async def wait_ready(self) -> None:
        """Wait until the server answers; raises UpstreamFailed after `wait_s`."""
        try:
            async with timeout(self._wait_s):
                await self._ready.wait()
        except TimeoutError as error:
            raise UpstreamFailed(
                f"the upstream server was gone for {self._wait_s:g} s (upstream_wait_s)"
            ) from error

    @asynccontextmanager
    async def refused(self) -> AsyncIterator[None]:
        """A request waits in this block because the server had no room for it."""
        self._refused += 1
        self._stats.waiting += 1
        self._state.full = True
        try:
            yield
        finally:
            self._refused -= 1
            self._state.full = self._refused > 0

    async def _load(self) -> UpstreamLoad:
        if self._facts.has_metrics:
            status, content = await self._client.get(METRICS_PATH, POLL_TIMEOUT_S)
            if status == _OK:
                with suppress(ValueError):
                    return read_metrics(content.decode(errors="replace"))
        # Without usable numbers, a server that still lists its models is not gone.
        status, _ = await self._client.get(MODELS_PATH, POLL_TIMEOUT_S)
        if status >= _ERRORS:
            raise UpstreamLost(f"{MODELS_PATH} of the upstream server answers with status {status}")
        stats = self._stats
        return UpstreamLoad(
            preemptions_total=stats.preemptions_total,
            prefix_queries_total=stats.prefix_queries_total,
            prefix_hits_total=stats.prefix_hits_total,
        )

    async def _probe_again(self) -> None:
        try:
            facts = await self._probe()
        except UpstreamUnusable as error:
            raise UpstreamChanged(str(error)) from error
        except UpstreamBusy as error:
            if self._state.outage:
                raise UpstreamLost(str(error)) from error
            return  # A full server is not gone: its other streams go on.
        if not facts.continues(self._facts):
            raise UpstreamChanged(
                f"{self._client.url} now serves {facts.summary}, before it was"
                f" {self._facts.summary}; the worker starts again"
            )
        # Its /metrics may have failed just now.
        has_metrics = facts.has_metrics or self._facts.has_metrics
        self._facts = replace(facts, has_metrics=has_metrics)
        self._state.kv_blocks = facts.kv_blocks
        self._state.upstream = f"{self._client.url}: {facts.summary}"

    def _note(self, load: UpstreamLoad) -> None:
        stats = self._stats
        stats.steps += 1
        stats.running = load.running or 0
        stats.waiting = load.waiting + self._refused
        stats.kv_usage = load.kv_usage if load.kv_usage is not None else 1.0
        stats.preemptions_total = load.preemptions_total
        stats.prefix_queries_total = load.prefix_queries_total
        stats.prefix_hits_total = load.prefix_hits_total

    def _note_answer(self) -> None:
        self._answered_s = monotonic_s()
        if self._state.outage:
            log.warning("the upstream server %s is back", self._client.url)
            self._state.outage = ""
        self._ready.set()

    def _note_failure(self, error: UpstreamLost) -> None:
        silent_s = monotonic_s() - self._answered_s
        if self._state.outage or (error.silent and silent_s < self._silent_s):
            return
        log.warning("the upstream server %s is gone: %s", self._client.url, error)
        self._state.outage = f"the upstream server {self._client.url} is gone: {error}"
        self._ready.clear()
        self._client.cut()
