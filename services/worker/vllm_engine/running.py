"""The requests that vLLM has, and the load that they make.

vLLM tells after each of its steps how many run and wait and how much KV is in use. What has come
since then is counted here: a request that was just handed over waits.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from services.core.planner.returns import RETURN_AFTER_S
from services.core.report import ClassTokens, Load
from services.core.request import Request, admission_blocks, blocks_for
from services.worker.vllm_engine.arguments import priority_of

STEPS_TO_START = 3
"""Steps that end after a request came until the last one's numbers count it for certain: vLLM may
plan one while another runs."""


class PrefixLookups(Protocol):
    """Prompt tokens of requests that started in a step after a look into the cache; hits of them.

    Requests that were preempted and start again are not among them.
    """

    queries: int
    hits: int


class SchedulerNumbers(Protocol):
    """What is read of vLLM's `SchedulerStats`, which come once a step."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_stats: PrefixLookups


class IterationNumbers(Protocol):
    """What is read of vLLM's `IterationStats`, which come with outputs."""

    num_preempted_reqs: int


@dataclass(slots=True)
class StepStats:
    """What vLLM told after its last step; `kv_usage` in [0, 1], the totals since it started."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0

    def note(self, scheduler: SchedulerNumbers | None, iteration: IterationNumbers | None) -> None:
        """Take in what vLLM told of a step; its outputs may come in several parts."""
        if iteration is not None:
            self.preemptions_total += iteration.num_preempted_reqs
        if scheduler is not None:
            self.steps += 1
            self.running = scheduler.num_running_reqs
            self.waiting = scheduler.num_waiting_reqs
            self.kv_usage = scheduler.kv_cache_usage
            self.prefix_queries_total += scheduler.prefix_cache_stats.queries
            self.prefix_hits_total += scheduler.prefix_cache_stats.hits


@dataclass(slots=True, eq=False)
class VllmRequest:
    """A request that vLLM has; `steps` had ended when it came."""

    request: Request
    since_s: float
    steps: int
    emitted: int = 0
    task: "asyncio.Task[None] | None" = None

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt_tokens + self.emitted

    @property
    def prompt_tokens(self) -> int:
        """What is a prompt to vLLM: output that another worker made, too."""
        return len(self.request.prompt_ids) + len(self.request.output_ids)

    @property
    def is_batch(self) -> bool:
        """Whether it is of the class `batch`."""
        return not self.request.service.online


@dataclass(slots=True)
class VllmRequests:
    """The requests of one engine with `blocks` KV blocks of `block_size` tokens.

    `by_priority`: vLLM starts them by `priority_of`, else as they come.
    """

    blocks: int
    block_size: int
    stats: StepStats
    by_priority: bool = False
    _by_id: dict[str, VllmRequest] = field(default_factory=dict)  # in order of arrival
    _prompt_tokens: int = 0
    _processed_online: int = 0
    _processed_batch: int = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, request: Request, now_s: float) -> VllmRequest:
        """A request was handed over."""
        entry = VllmRequest(request, now_s, self.stats.steps)
        self._by_id[request.request_id] = entry
        return entry

    def get(self, request_id: str) -> VllmRequest | None:
        """The request of that id."""
        return self._by_id.get(request_id)

    def emit(self, entry: VllmRequest, count: int, cached_tokens: int = 0) -> None:
        """Output tokens of it came; with the first ones its prompt has run, but what was cached."""
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
        """It is over; False if it was removed before. Another of its id stays."""
        if self._by_id.get(entry.request.request_id) is not entry:
            return False
        del self._by_id[entry.request.request_id]
        return True

    def waiting(self) -> list[VllmRequest]:
        """Requests without KV, as far as is known: the last in the order in which vLLM starts."""
        unstarted = [entry for entry in self._by_id.values() if not entry.emitted]
        if self.by_priority:
            unstarted.sort(key=lambda entry: priority_of(entry.request.service))
        count = min(len(unstarted), max(0, len(self._by_id) - self.stats.running))
        return unstarted[len(unstarted) - count :]

    def overdue(self, now_s: float) -> list[VllmRequest]:
        """Requests that may go back and have waited too long while vLLM had no room for them."""
        told = min(self.stats.waiting, len(self._by_id))
        return [
            entry
            for entry in self.waiting()[-told:]
            if told
            and entry.request.returnable
            and entry.since_s + RETURN_AFTER_S <= now_s
            and entry.steps + STEPS_TO_START <= self.stats.steps
        ]

    def load(self) -> Load:
        """The load now. A block is in use if vLLM says so and a request may have it.

        vLLM tells nothing while nothing runs: what it told last may be of requests that are gone.
        Nor does it tell before the first token how far a prompt is and what of it was cached: until
        then the whole prompt is to be prefilled. What vLLM recomputes it does not tell: that is 0.
        """
        waiting = self.waiting()
        queued = set(waiting)
        started = [entry for entry in self._by_id.values() if entry not in queued]
        held = {entry: blocks_for(entry.tokens + 1, self.block_size) for entry in started}
        told = round(self.stats.kv_usage * self.blocks)
        return Load(
            running=len(started),
            waiting=len(waiting),
            kv_blocks_free=self.blocks - min(told, sum(held.values()), self.blocks),
            kv_blocks_wanted=sum(map(self._wanted, waiting)),
            preemptions_total=self.stats.preemptions_total,
            kv_blocks_total=self.blocks,
            prompt_tokens_total=self._prompt_tokens,
            batch_running=sum(entry.is_batch for entry in started),
            batch_waiting=sum(entry.is_batch for entry in waiting),
            kv_blocks_batch=sum(count for entry, count in held.items() if entry.is_batch),
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

    def _wanted(self, entry: VllmRequest) -> int:
        longest = len(entry.request.prompt_ids) + entry.request.limits.max_tokens
        return admission_blocks(entry.tokens, longest, self.block_size)
