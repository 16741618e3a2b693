"""Events and commands of a worker's planner.

Tokens are named tuples, as the chunks of `batch.py` are: there are as many in each iteration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.core.logprobs import LogprobRows
from services.core.planner.batch import Microbatch, SampleNotes
from services.core.planner.block_table import Move
from services.core.planner.configuration_events import ConfigurationEvent
from services.core.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request was handed to the worker."""

    now_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The client or the gateway has aborted a request; unknown ids are ignored."""

    now_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class IterationFinished:
    """A planned batch has run; `sampled` maps request id to the token chosen for it.

    `number` is its microbatch's; None means the oldest in flight. Results come in order; one of a
    discarded microbatch is ignored. `notes` is None if there are none; a request that `failed` in
    them has no token.
    """

    now_s: float
    sampled: Mapping[str, int]
    number: int | None = None
    notes: SampleNotes | None = None


@dataclass(frozen=True, slots=True)
class IterationDropped:
    """The running batch of a group of one was given up part-way; its tokens will run again."""

    now_s: float


@dataclass(frozen=True, slots=True)
class IterationSuspended:
    """The running batch of a group of one was interrupted between layers, and can go on later."""

    now_s: float


@dataclass(frozen=True, slots=True)
class WaitLooked:
    """The worker looks which requests have waited here too long to start; see `returns.py`.

    Unless they `may_start`, this worker plans nothing.
    """

    now_s: float
    may_start: bool = True


IterationEvent = IterationFinished | IterationDropped | IterationSuspended
RequestEvent = RequestArrived | RequestAborted | IterationEvent | WaitLooked
Event = RequestEvent | ConfigurationEvent


class EmitToken(NamedTuple):
    """Send an output token to the client; `finish_reason` is set on the last.

    `logprobs` is the token's row if it was asked for. With the first output token come
    `prompt_logprobs`, one row for each prompt token but the first, if they were asked for, and how
    many tokens of the prompt were in the cache.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # instead of tuple.index, which is not needed here
    token_id: int
    finish_reason: FinishReason | None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Tell the client that the request cannot be served; cause and remedy in `message`.

    `retryable`: it could be served at another time. A running request ends with it. `returned`: the
    request has not begun here, or its KV is lost, and it shall get another place under the same id.
    `kv_lost`: its worker's group has lost a member, and with it what KV the request had.
    """

    request_id: str
    message: str
    retryable: bool = False
    returned: bool = False
    kv_lost: bool = False


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """Tell every stage that the blocks of these requests are free, before it runs what follows."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoveBlocks:
    """Copy KV to lower blocks, in every layer; the table names the new blocks already."""

    moves: tuple[Move, ...]


ClientCommand = EmitToken | RefuseRequest
Command = ClientCommand | BlocksFreed | MoveBlocks


@dataclass(frozen=True, slots=True)
class Planned:
    """In a log: at `now_s` the planner was asked for a microbatch, and gave this one or none."""

    now_s: float
    microbatch: Microbatch | None
