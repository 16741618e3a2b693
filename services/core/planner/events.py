"""Events that the engine passes to its planner, and commands that the planner returns.

Ids are sequence ids, even in the fields `request_id`: the engine replaces the request ids of
arriving requests and aborts, and those of client commands on the way out, see `sequence_ids.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.core.cost.model import CostModel
from services.core.destination import Destination
from services.core.host.vocabulary import HostCommand, HostEvent
from services.core.logprobs import LogprobRows
from services.core.planner.batch import Microbatch, SampleNotes
from services.core.planner.block_table import BlockMove
from services.core.planner.configuration_events import ConfigurationEvent
from services.core.planner.pin_events import PinEvent
from services.core.report import OtherRoom
from services.core.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request arrived at the worker."""

    now_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The client or the gateway aborted a request; unknown ids are ignored."""

    now_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class IterationFinished:
    """A microbatch has run at all stages; `sampled` maps sequence id to the sampled token.

    `number` is that of the microbatch; None means the oldest in flight. Results arrive in order;
    those of discarded microbatches are ignored. `notes` is None if empty; a sequence that `failed`
    in the notes has no token.
    """

    now_s: float
    sampled: Mapping[str, int]
    number: int | None = None
    notes: SampleNotes | None = None


@dataclass(frozen=True, slots=True)
class IterationDropped:
    """The iteration of a single worker was interrupted and discarded: its tokens run again."""

    now_s: float


@dataclass(frozen=True, slots=True)
class IterationSuspended:
    """The running iteration of a single worker was suspended between layers; it can resume."""

    now_s: float


@dataclass(frozen=True, slots=True)
class RequeueChecked:
    """Return requests that have waited here for too long to the scheduler, see `requeue.py`.

    `may_start` is False while this worker plans nothing because it leads no group.
    """

    now_s: float
    may_start: bool = True


@dataclass(frozen=True, slots=True)
class DrainContinued:
    """The worker shuts down: return requests for which other groups have room, see `drain.py`.

    Sequences in `shipped` move with their KV.
    """

    now_s: float
    room: OtherRoom
    shipped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CostModelLearned:
    """Plan with this cost model from now on."""

    model: CostModel


@dataclass(frozen=True, slots=True)
class BlocksBorrowed:
    """A measurement overwrites free blocks, which are free again before the next event.

    `counts`: number of blocks of each chunk of the measurement. Answered by `LendBlocks`.
    """

    counts: tuple[int, ...]


IterationEvent = IterationFinished | IterationDropped | IterationSuspended
RequestEvent = RequestArrived | RequestAborted | IterationEvent | RequeueChecked | DrainContinued
MeasurementEvent = CostModelLearned | BlocksBorrowed
Event = RequestEvent | MeasurementEvent | ConfigurationEvent | PinEvent | HostEvent


class EmitToken(NamedTuple):
    """Send an output token to the client; a named tuple for speed, see `batch.py`.

    `finish_reason` is set on the last token. `logprobs` is the token's row, if requested. The first
    output token carries `prompt_logprobs`, if requested: a row for each prompt token except the
    first; and `cached_tokens`, the prefix cache hits of the prompt (vLLM's and those of upstream
    servers may come with the last).
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
    """Refuse a request, end it while it runs, or return it; `message` names cause and remedy.

    `retryable`: a later attempt may succeed. `returned`: the request has not started here, or
    continues elsewhere; the gateway asks the scheduler again under the same id. `kv_lost`: the
    worker's group lost a member, and with it the KV of the request. `leaving`: the worker shuts
    down. `go_to`: the worker to which the KV of the returned request was shipped.
    `server_losses`: losses of upstream servers under the request so far.
    """

    request_id: str
    message: str
    retryable: bool = False
    returned: bool = False
    kv_lost: bool = False
    leaving: bool = False
    go_to: Destination | None = None
    server_losses: int = 0


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """Every stage must free the blocks of these sequences before it runs later microbatches."""

    seq_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoveBlocks:
    """Copy KV to lower blocks, in every layer; the block tables already refer to the new blocks."""

    moves: tuple[BlockMove, ...]


@dataclass(frozen=True, slots=True)
class LendBlocks:
    """The answer to `BlocksBorrowed`: the block ids of each chunk."""

    tables: tuple[tuple[int, ...], ...]


ClientCommand = EmitToken | RefuseRequest
Command = ClientCommand | BlocksFreed | MoveBlocks | LendBlocks | HostCommand


@dataclass(frozen=True, slots=True)
class Planned:
    """Log entry: `plan` at `now_s` returned this microbatch, or None."""

    now_s: float
    microbatch: Microbatch | None
