"""Tracks the requests in vLLM, and derives from them the load that the worker reports.

After each step vLLM reports only how many requests run and wait, and its KV usage. Requests
submitted since that step count as waiting. A returnable request may go back to the scheduler before
it starts. Online requests are those of all classes except batch.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from services.core.planner.drain import Candidate
from services.core.planner.requeue import REQUEUE_AFTER_S
from services.core.report import ClassTokens, Load
from services.core.request import Request, admission_blocks, blocks_for
from services.worker.vllm_engine.adapter_slots import SlotClaim
from services.worker.vllm_engine.arguments import priority_of
from services.worker.vllm_engine.server_losses import LossCount

STEPS_TO_START = 3
"""Steps that must end after the arrival of a request before vLLM's numbers certainly include it,
because vLLM may schedule a step while another runs."""


class PrefixLookups(Protocol):
    """Prompt tokens looked up in the prefix cache in a step, and hits among them.

    Requests that restart after a preemption are not counted.
    """

    queries: int
    hits: int


class SchedulerNumbers(Protocol):
    """The used fields of vLLM's `SchedulerStats`, which vLLM reports once per step."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_stats: PrefixLookups


class IterationNumbers(Protocol):
    """The used fields of vLLM's `IterationStats`, which vLLM reports with outputs."""

    num_preempted_reqs: int


@dataclass(slots=True)
class StepStats:
    """vLLM's statistics after its last step; `kv_usage` in [0, 1], totals since the start."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0

    def note(self, scheduler: SchedulerNumbers | None, iteration: IterationNumbers | None) -> None:
        """Update from statistics of a step; vLLM may report a step's outputs in several parts."""
        if iteration is not None:
            self.preemptions_total += iteration.num_preempted_reqs
        if scheduler is not None:
            self.steps += 1
            self.running = scheduler.num_running_reqs
            self.waiting = scheduler.num_waiting_reqs
            self.kv_usage = scheduler.kv_cache_usage
            self.prefix_queries_total += scheduler.prefix_cache_stats.queries
            self.prefix_hits_total += scheduler.prefix_cache_stats.hits


@dataclass(slots=True)
class EngineState:
    """State of an engine beside vLLM's statistics; it changes only for upstream servers.

    `upstream` describes the server, `outage` why it computes nothing at present, "" if it does.
    `full`: it refused a request for lack of room. `kv_blocks`: its KV cache, if that has changed
    since the start. `sequences_max`: most requests that it takes at once, 0 if they are not
    limited. `resumes`: it continues the output of another worker or of a lost server.
    """

    upstream: str = ""
    outage: str = ""
    full: bool = False
    kv_blocks: int = 0
    sequences_max: int = 0
    resumes: bool = True

    @property
    def has_room(self) -> bool:
        """Whether further requests may start."""
        return not self.outage and not self.full


@dataclass(slots=True, eq=False)
class VllmRequest:
    """A request in vLLM."""

    request: Request
    since_s: float  # time of submission
    steps: int  # number of steps that had ended by then
    losses: LossCount  # of upstream servers
    emitted: int = 0  # output tokens so far
    task: "asyncio.Task[None] | None" = None  # reads its output
    claim: SlotClaim | None = None  # of its adapter's slot

    @property
    def tokens(self) -> int:
        """Prompt and output tokens so far."""
        return self.prompt_tokens + self.emitted

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt submitted to vLLM, including output of earlier workers."""
        return len(self.request.prompt_ids) + len(self.request.output_ids)

    @property
    def is_batch(self) -> bool:
        """Whether the request is of the class `batch`."""
        return not self.request.service.online


@dataclass(slots=True)
class VllmRequests:
    """The requests of an engine with `blocks` KV blocks of `block_size` tokens."""

    blocks: int
    block_size: int
    stats: StepStats
    by_priority: bool = False  # vLLM starts requests by `priority_of`, else in order of arrival
    _by_id: dict[str, VllmRequest] = field(default_factory=dict)  # in order of arrival
    _prompt_tokens: int = 0  # of all requests with a first token
    _processed_online: int = 0  # tokens computed for online requests
    _processed_batch: int = 0  # tokens computed for batch requests

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, request: Request, now_s: float) -> VllmRequest:
        """Add a request that is being submitted to vLLM."""
        losses = LossCount(request.server_losses)
        entry = VllmRequest(request, now_s, self.stats.steps, losses)
        self._by_id[request.request_id] = entry
        return entry

    def get(self, request_id: str) -> VllmRequest | None:
        """The request with this id, or None."""
        return self._by_id.get(request_id)

    def emit(self, entry: VllmRequest, count: int, cached_tokens: int = 0) -> None:
        """Count output tokens of a request, and its prompt tokens with the first of them."""
        processed = count
        if count and not entry.emitted and not entry.request.output_ids:
            self._prompt_tokens += len(entry.request.prompt_ids)
            processed += len(entry.request.prompt_ids) - cached_tokens
        entry.emitted += count
        if entry.is_batch:
            self._processed_batch += processed
        else:
            self._processed_online += processed

    def remove(self, entry: VllmRequest) -> bool:
        """Remove a request; returns False if it was removed before."""
        # A later request may have the same id.
        if self._by_id.get(entry.request.request_id) is not entry:
            return False
        del self._by_id[entry.request.request_id]
        return True

    def waiting(self) -> list[VllmRequest]:
        """The requests that probably wait in vLLM, in the order in which vLLM starts them."""
        # vLLM does not report which requests wait: assume the last in its order.
        unstarted = [entry for entry in self._by_id.values() if not entry.emitted]
        if self.by_priority:
            unstarted.sort(key=lambda entry: priority_of(entry.request.service))
        count = min(len(unstarted), max(0, len(self._by_id) - self.stats.running))
        return unstarted[len(unstarted) - count :]

    def overdue(self, now_s: float) -> list[VllmRequest]:
        """Returnable requests that have waited in vLLM for `REQUEUE_AFTER_S` or longer."""
        queued = min(self.stats.waiting, len(self._by_id))
        return [
            entry
            for entry in self.waiting()[-queued:]
            if queued
            and entry.request.returnable
            and entry.since_s + REQUEUE_AFTER_S <= now_s
            and entry.steps + STEPS_TO_START <= self.stats.steps
        ]

    def candidates(self) -> list[Candidate]:
        """The requests that may return while the worker shuts down."""
        waiting = set(self.waiting())
        return [
            Candidate(
                entry.request.request_id,
                entry.request,
                entry.tokens,
                entry not in waiting,
                entry.since_s,
            )
            for entry in self._by_id.values()
            # vLLM cannot resume a partly matched grammar, and the next worker may run vLLM, too.
            # Whether other workers have a slot for an adapter is not known.
            if entry.claim is None and (not entry.emitted or entry.request.sampling.grammar is None)
        ]

    def load(self) -> Load:
        """The current load.

        A whole prompt counts as tokens to prefill until its first output token, because vLLM does
        not report partial prefills or cache hits earlier. Nor does it report recomputed tokens,
        which are 0 here.
        """
        waiting = self.waiting()
        queued = set(waiting)
        started = [entry for entry in self._by_id.values() if entry not in queued]
        blocks = {entry: blocks_for(entry.tokens + 1, self.block_size) for entry in started}
        # vLLM reports nothing while it is idle, so its last KV usage may include requests that have
        # ended: limit it to the blocks that the present requests can use.
        reported = round(self.stats.kv_usage * self.blocks)
        return Load(
            running=len(started),
            waiting=len(waiting),
            kv_blocks_free=self.blocks - min(reported, sum(blocks.values()), self.blocks),
            kv_blocks_wanted=sum(map(self._blocks_wanted, waiting)),
            preemptions_total=self.stats.preemptions_total,
            kv_blocks_total=self.blocks,
            prompt_tokens_total=self._prompt_tokens,
            batch_running=sum(entry.is_batch for entry in started),
            batch_waiting=sum(entry.is_batch for entry in waiting),
            kv_blocks_batch=sum(count for entry, count in blocks.items() if entry.is_batch),
            prefill_tokens=sum(
                entry.prompt_tokens for entry in self._by_id.values() if not entry.emitted
            ),
            prefix_queries_total=self.stats.prefix_queries_total,
            prefix_hits_total=self.stats.prefix_hits_total,
            tokens=ClassTokens(
                online_processed_tokens_total=self._processed_online,
                batch_processed_tokens_total=self._processed_batch,
            ),
        )

    def _blocks_wanted(self, entry: VllmRequest) -> int:
        longest = len(entry.request.prompt_ids) + entry.request.limits.max_tokens
        return admission_blocks(entry.tokens, longest, self.block_size)
