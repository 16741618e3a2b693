"""Messages between the gateway and scheduler or workers, without protobuf.

What is made for each token is a Struct: a frozen dataclass takes ten times as long to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from services.core.ask import Assignment, Refusal
from services.core.groups.vocabulary import Group
from services.core.report import MemoryReport
from services.core.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class GroupStep:
    """How far a change of groups is: "preparing", "committed", "stable" or "failed"."""

    phase: str
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class Ticket:
    """The request waits in the scheduler's queue."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The scheduler lives. `wants_prefixes`: asks shall tell the beginnings of their prompts."""

    groups_serving: int
    queued: int
    wants_prefixes: bool = False


SchedulerMessage = Ticket | Assignment | Refusal | Heartbeat


class Finish(Enum):
    """Why a worker ended a request; `KV_LOST` is a return after the loss of a member."""

    STOP = auto()
    LENGTH = auto()
    STALE_EPOCH = auto()
    INVALID = auto()
    OVERLOADED = auto()
    RETURNED = auto()
    ENGINE_DIED = auto()
    KV_LOST = auto()
    ERROR = auto()


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a request goes on: the new owner and its address (host:port).

    `traceparent` is that of the change which moved it, "" if it is not traced.
    """

    worker_id: str
    address: str
    group_id: str
    epoch: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """Where a request's time went at one worker, in seconds; see RequestTimes in worker.proto."""

    wait_s: float
    prefill_s: float
    decode_s: float
    preempted_s: tuple[float, ...] = ()


class TokenEvent(msgspec.Struct, frozen=True):
    """New tokens of a request; `first_index` is the output index of the first of them.

    `logprobs` has one entry for each token, or none; `prompt_logprobs` come with the first tokens
    if they were asked for, and are made when they are looked at, since they may be many. `moved` is
    set on the last event from a worker that has handed the request to another, `times` on the last
    event of one that tells them. `cached_tokens` of the prompt were cached, as is told
    with the first output token.
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


class Fresh(msgspec.Struct, frozen=True):
    """Tokens of a request that its reader has not taken yet, and the ending if it is reached."""

    token_ids: Sequence[int]
    finish: Finish | None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    @property
    def prompt_numbers(self) -> int:
        """About how many log probabilities of the prompt there are."""
        told = self.prompt_logprobs
        return len(told) * (1 + len(told[-1].top)) if told else 0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a service instance tells about itself."""

    name: str
    pids: tuple[int, ...]
    rss_bytes: int
    ready: bool


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster as the memory manager sees it."""

    workers: tuple[MemoryReport, ...]
    groups: tuple[Group, ...]
    # Decisions about memory and their numbers, by the names in memmgr.proto; oldest first.
    decisions: tuple[dict[str, Any], ...] = ()
    # Tokens of KV that models lack beyond what all merges can gain, by model.
    shortfalls: dict[str, int] = field(default_factory=dict)
    # The last loss of each group, by the names in memmgr.proto; the newest is last.
    losses: tuple[dict[str, Any], ...] = ()
