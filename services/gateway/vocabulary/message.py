"""Messages between the gateway and other services, independent of protobuf.

Messages that are created per token are msgspec Structs: a frozen dataclass takes ten times as long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from services.core.ask import Assignment, Proceed, Refusal
from services.core.destination import Destination
from services.core.groups.vocabulary import Group
from services.core.report import MemoryReport
from services.core.request import TokenLogprobs
from services.core.service import ServiceClass


@dataclass(frozen=True, slots=True)
class GroupStep:
    """Progress of a merge or split: "preparing", "committed", "stable" or "failed"."""

    phase: str
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class RequestsMoved:
    """Running requests have moved to the worker `target`; `reason`: why no further one did."""

    target: str
    moved: int
    kept: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """The scheduler has put the request into its queue."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ClassWait:
    """Predicted wait of a new request of a class, in seconds.

    The wait exceeds `optimistic_s` with a probability of 80 %. `limit_s` is the longest wait of a
    request without a target, None without a limit.
    """

    optimistic_s: float
    limit_s: float | None


@dataclass(frozen=True, slots=True)
class WaitingBuckets:
    """Waiting requests by length: the greatest length in tokens and the count of each bucket.

    `padding_share`: share of the tokens that would be padding if requests were padded to the
    greatest length of their bucket.
    """

    buckets: tuple[tuple[int, int], ...]
    padding_share: float


@dataclass(frozen=True, slots=True)
class ModelBeat:
    """A model's part of a heartbeat."""

    groups_serving: int
    queued: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The scheduler is alive. `wants_prefixes`: asks must include the prompts' prefix hashes.

    `class_waits`: by model and class. `wants_outcomes`: the gateway reports first tokens and ends
    of requests. `buckets` and `models`: by model; `models` is empty from older schedulers.
    """

    groups_serving: int
    queued: int
    wants_prefixes: bool = False
    class_waits: Mapping[tuple[str, ServiceClass], ClassWait] = field(default_factory=dict)
    wants_outcomes: bool = False
    buckets: Mapping[str, WaitingBuckets] = field(default_factory=dict)
    models: Mapping[str, ModelBeat] = field(default_factory=dict)

    def of(self, model: str) -> ModelBeat:
        """The part of a model; the totals if the scheduler is older than `models`."""
        if not self.models:
            return ModelBeat(self.groups_serving, self.queued)
        return self.models.get(model, NO_BEAT)


NO_BEAT = ModelBeat(0, 0)
SchedulerMessage = Ticket | Assignment | Refusal | Proceed | Heartbeat


class Finish(Enum):
    """Why a worker ended a request.

    `STALE_EPOCH`: the worker's group has changed since the assignment. `RETURNED`: the scheduler
    must assign another worker. `KV_LOST`: likewise, after the group lost a member and its KV.
    `LEAVING`: likewise, because the worker shuts down.
    """

    STOP = auto()
    LENGTH = auto()
    STALE_EPOCH = auto()
    INVALID = auto()
    OVERLOADED = auto()
    RETURNED = auto()
    ENGINE_DIED = auto()
    KV_LOST = auto()
    LEAVING = auto()
    ERROR = auto()


@dataclass(frozen=True, slots=True)
class Moved:
    """The worker that has adopted a request in a change of groups, and its address (host:port).

    `traceparent` is the trace of the change, "" if the change is not traced.
    """

    worker_id: str
    address: str
    group_id: str
    epoch: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """Time that a request spent at a worker, in seconds; see RequestTimes in worker.proto."""

    wait_s: float
    prefill_s: float
    decode_s: float
    preempted_s: tuple[float, ...] = ()


class TokenEvent(msgspec.Struct, frozen=True):
    """New tokens of a request; `first_index` is the output index of the first.

    `logprobs` has an entry per token, or is empty. `prompt_logprobs` are set with the first tokens,
    if requested; they may be many, so they are decoded lazily. `moved` is set in the
    last event of a worker whose request another worker has adopted, `times` in the last event of a
    worker that reports times. `cached_tokens` is the number of prompt tokens from the prefix cache,
    set with the first output token, or with the last in front of an upstream server. `go_to` may be
    set if the worker returns the request, `server_losses` (of upstream servers under it, in all) if
    it returns or fails.
    """

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    finish: Finish | None
    message: str
    moved: Moved | None = None
    times: WorkerTimes | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    cached_tokens: int = 0
    go_to: Destination | None = None
    server_losses: int = 0


class UnreadTokens(msgspec.Struct, frozen=True):
    """Tokens of a request since the reader's previous read, and the finish if it is reached."""

    token_ids: Sequence[int]
    finish: Finish | None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    @property
    def prompt_logprob_count(self) -> int:
        """Approximate number of log probabilities of the prompt."""
        logprobs = self.prompt_logprobs
        return len(logprobs) * (1 + len(logprobs[-1].top)) if logprobs else 0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State that a service instance reports about itself."""

    name: str
    pids: tuple[int, ...]
    rss_bytes: int
    ready: bool


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The memory manager's report of workers, groups and its decisions."""

    workers: tuple[MemoryReport, ...]
    groups: tuple[Group, ...]
    # Decisions of the overload monitor, with the fields of memmgr.proto; the oldest first.
    decisions: tuple[dict[str, Any], ...] = ()
    # Missing KV cache in tokens, even if all groups merged, by model.
    shortfalls: dict[str, int] = field(default_factory=dict)
    # The last loss of each group, with the fields of memmgr.proto; the newest last.
    losses: tuple[dict[str, Any], ...] = ()
    # Why merged groups do not split now, by group; "" for a group that is about to split.
    split_obstacles: dict[str, str] = field(default_factory=dict)
