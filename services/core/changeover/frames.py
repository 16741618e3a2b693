"""Messages between the members of a change, on the activation lane.

Each lane is FIFO per peer, and the protocol relies on that: a stage applies its leader's
microbatches in order, so all stages agree on the number of blocks of each request, and no frame of
a new configuration overtakes the last microbatch of the old configuration.

The fields are encoded by name: renaming a field needs another `PROTOCOL_VERSION`.
`seq_id` fields hold sequence ids: each start of a request has an id of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.core.changeover.route import Transfer
from services.core.groups.layer_map import Stage
from services.core.planner.batch import Microbatch, PromptScore, SampleNotes, SampleSpec
from services.core.planner.sequence import SequenceState
from services.core.prefix.cache_update import PrefixCacheUpdate


class StageChunk(NamedTuple):
    """A chunk for later stages, which need no token ids and keep block tables of their own.

    It has `tokens` tokens at positions `start` onwards; the request has `blocks` blocks by then.
    The last stage uses `sample` and `score`. Sampling terms are sent once, with the request's
    first token in a configuration or after a preemption, which keeps later frames small.
    """

    seq_id: str
    start: int
    tokens: int
    blocks: int
    sample: SampleSpec | None
    score: PromptScore | None = None


@dataclass(frozen=True, slots=True)
class Activations:
    """From stage to stage: run this microbatch. The payload is hidden [tokens, hidden_size].

    Stages free the blocks of `released` requests before they run it. Without chunks there is
    nothing to run and no payload. `vacant_s`: how long the pipeline was empty before this
    microbatch. `prefixes` as in `Microbatch`.
    """

    number: int
    released: tuple[str, ...]
    chunks: tuple[StageChunk, ...]
    vacant_s: float = 0.0
    prefixes: PrefixCacheUpdate | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """From the last stage to the leader: the tokens sampled in microbatch `number`.

    `notes`: log probabilities and the like, as in `IterationFinished`.
    """

    number: int
    tokens: Mapping[str, int]
    notes: SampleNotes | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    """From the leader of an ending configuration to its stages: no microbatch is in flight.

    `released` as in `Activations`.
    """

    released: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """To the leader: this member has switched to the envelope's epoch.

    It has `capacity` blocks, of which `used` belong to requests of earlier configurations.
    """

    capacity: int
    used: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """To the leader: this member has `blocks` blocks.

    If a preparation lowers the number to make room for parameters, `attempt` names it, and the
    leader answers with `CapacityKept` once at most `blocks` are in use here.
    """

    blocks: int
    attempt: str = ""


@dataclass(frozen=True, slots=True)
class CapacityKept:
    """From the leader: at most as many blocks are in use at `worker_id` as it announced.

    `attempt` is that of the `Capacity` frame. Forwarded from stage to stage with the `released`
    requests, as `Reserve` is.
    """

    worker_id: str
    attempt: str
    released: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForeignBlocksFreed:
    """To the leader: this member freed `blocks` blocks of requests that other leaders had."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """From a request's old leader to its new leader: adopt the request.

    `stages` hold its KV (none if it has no blocks); `origin` is the id of their group.
    `highest_block` is its largest block id at the sender. `age_s` is the time since its arrival: a
    duration, because clocks of different hosts cannot be compared.
    """

    sequence: SequenceState
    origin: str
    stages: tuple[Stage, ...]
    highest_block: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Adopted:
    """To the old leader: this member leads the request and emits tokens from `next_index` on."""

    seq_id: str
    next_index: int


@dataclass(frozen=True, slots=True)
class RequestDropped:
    """From the old leader of an adopted request: its client has aborted it."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class AllAdopted:
    """From an old leader: no `Adopt` of the envelope's epoch follows.

    From the leader of an ending configuration to its stages, also: no `Adopted` follows.
    """


@dataclass(frozen=True, slots=True)
class AllMoved:
    """From `leader`: it has adopted all its sequences of this change, and all their KV arrived.

    Sent to the members of other groups, and forwarded from stage to stage in its own. `kept`, only
    for its own stages: its sequences, and released sequences that the stages still hold.
    """

    leader: str
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberRemoved:
    """To a former member: the sender's next configuration does not include it."""


@dataclass(frozen=True, slots=True)
class EpochAbandoned:
    """From a member of the change: it has left the envelope's epoch, or will never enter it.

    It neither sends nor accepts frames of this epoch any more, so KV that it still owed must be
    recomputed.
    """


@dataclass(frozen=True, slots=True)
class Reserve:
    """From the leader: reserve blocks for these transfers of a request's KV.

    Answered by `Reserved`. The request needs `blocks` blocks in all at `worker_id`, which has all
    of them or none. Forwarded from stage to stage like a microbatch, and with the requests that
    were `released` since the last microbatch: the leader's ledger counts their blocks as free.
    """

    worker_id: str
    seq_id: str
    blocks: int
    transfer_ids: tuple[str, ...]
    released: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """To the leader: the blocks are reserved, and the transfers are accepted from now on."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class SendKv:
    """From the leader to `transfer.source`: send the KV of the request's first `blocks` blocks."""

    seq_id: str
    transfer_id: str
    transfer: Transfer
    blocks: int


@dataclass(frozen=True, slots=True)
class KvEnded:
    """To the leader: a transfer is verified at its destination (`intact`), or has failed.

    Reports the `TransferOutcome` of a member; a frame of its own, since its bytes are on the wire.
    """

    seq_id: str
    transfer_id: str
    intact: bool


@dataclass(frozen=True, slots=True)
class FreeKv:
    """From the leader: free the request's KV in layers that left the stage.

    `whole_table`: free all its blocks here, since the member has left the request's group.
    Answered by `KvFreed`.
    """

    seq_id: str
    whole_table: bool


@dataclass(frozen=True, slots=True)
class KvFreed:
    """To the leader: the KV is freed, and this member now has `capacity` blocks."""

    seq_id: str
    capacity: int


MemberFrame = (
    Activations
    | Samples
    | Drained
    | Joined
    | Capacity
    | CapacityKept
    | ForeignBlocksFreed
    | Adopt
    | Adopted
    | RequestDropped
    | AllAdopted
    | AllMoved
    | EpochAbandoned
    | MemberRemoved
    | Reserve
    | Reserved
    | SendKv
    | KvEnded
    | FreeKv
    | KvFreed
)


def activations(microbatch: Microbatch, vacant_s: float) -> Activations:
    """The frame header that goes to later stages with a microbatch's hidden states."""
    return Activations(
        microbatch.number,
        microbatch.released,
        tuple(
            StageChunk(
                chunk.seq_id,
                chunk.start,
                len(chunk.token_ids),
                len(chunk.block_ids),
                chunk.sample,
                chunk.score,
            )
            for chunk in microbatch.batch.chunks
        ),
        vacant_s,
        microbatch.prefixes,
    )
