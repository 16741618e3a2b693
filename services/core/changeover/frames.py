"""Frames: the messages between the members of a change of groups, on the activation lane.

The activation lane is a connection between two members that keeps the order of frames. The protocol
relies on that order: a stage applies its leader's microbatches in order, so all stages agree on the
number of blocks of each request, and no frame of a new configuration overtakes the last microbatch
of the old configuration. Every frame travels in an envelope with the epoch of a configuration.

Terms: a *stage* is a member with its layers; the first stage is the *leader*, which plans
microbatches and keeps a *ledger* of the free blocks of all stages. An *old leader* led a sequence
before the change, a *new leader* leads it afterwards. `released`: ids of sequences whose blocks the
leader counts as free since the last frame with that field; the stage frees them.

The fields are encoded by name: renaming a field requires a new `PROTOCOL_VERSION`.
`seq_id` is a sequence id, which is unique to each start of a request.
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

    It has `tokens` tokens at positions from `start` on; with it, the sequence needs `blocks` blocks
    in total. Only the last stage uses `sample` and `score`. Sampling parameters are sent once, with
    the sequence's first sampled token in a configuration or after a preemption.
    """

    seq_id: str
    start: int
    tokens: int
    blocks: int
    sample: SampleSpec | None
    score: PromptScore | None = None


@dataclass(frozen=True, slots=True)
class Activations:
    """From stage to stage: run this microbatch. Payload: hidden states [tokens, hidden_size].

    A stage frees the blocks of `released` sequences before it runs the microbatch. A frame without
    chunks has no payload and only releases blocks. `vacant_s`: how long the pipeline was empty
    before this microbatch. `prefixes` as in `Microbatch`.
    """

    number: int
    released: tuple[str, ...]
    chunks: tuple[StageChunk, ...]
    vacant_s: float = 0.0
    prefixes: PrefixCacheUpdate | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """From the last stage to the leader: the tokens sampled in microbatch `number`.

    `tokens` is by sequence id. `notes`: additional results such as log probabilities, as in
    `IterationFinished`.
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
    """To the new leader: this member runs the stage of the envelope's epoch from now on.

    It has `capacity` blocks, of which `used` hold KV of sequences of earlier configurations.
    `missed`: it has left its last configuration without `Drained`, so `used` may include KV of
    sequences that their leader had released.
    """

    capacity: int
    used: int
    missed: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """To the leader: this member has `blocks` blocks.

    If a preparation lowers the number to make room for parameters, `attempt` is its id, and the
    leader answers with `CapacityKept` once at most `blocks` blocks are in use at this member.
    """

    blocks: int
    attempt: str = ""


@dataclass(frozen=True, slots=True)
class CapacityKept:
    """From the leader: block use at `worker_id` has fallen to the capacity that it announced.

    `attempt` is the id from the `Capacity` frame. Forwarded from stage to stage, as `Reserve` is.
    """

    worker_id: str
    attempt: str
    released: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForeignBlocksFreed:
    """To the leader: this member freed `blocks` blocks of sequences that it does not lead."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """From a sequence's old leader to its new leader: adopt the sequence.

    `stages` hold its KV (empty if it has no blocks); `origin` is the id of their group.
    `highest_block` is its highest block id at the sender. `age_s` is the time since its arrival: a
    duration, because clocks of different hosts cannot be compared.
    """

    sequence: SequenceState
    origin: str
    stages: tuple[Stage, ...]
    highest_block: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Adopted:
    """To the old leader: this member leads the sequence, and emits tokens from `next_index` on."""

    seq_id: str
    next_index: int


@dataclass(frozen=True, slots=True)
class RequestDropped:
    """From the old leader to the new leader of a sequence: its client has aborted it."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class AllAdopted:
    """From an old leader: it sends no further `Adopt` of the envelope's epoch.

    If the leader of an ending configuration sends it to its stages, no `Adopted` follows either.
    """


@dataclass(frozen=True, slots=True)
class AllMoved:
    """From `leader`: it has adopted all its sequences of this change, and all their KV has arrived.

    Sent to the members of other groups, and forwarded from stage to stage in its own group. `kept`,
    set only in its own group: its sequences, and released sequences whose blocks the stages have
    yet to free.
    """

    leader: str
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberRemoved:
    """To a former member: the sender's next configuration does not include it."""


@dataclass(frozen=True, slots=True)
class EpochAbandoned:
    """From a member of the change: it has left the envelope's epoch, or will never enter it.

    The sender neither sends nor accepts frames of this epoch any more, so KV that it has not sent
    must be recomputed.
    """


@dataclass(frozen=True, slots=True)
class Reserve:
    """From the leader: reserve blocks at `worker_id` for these transfers of a sequence's KV.

    Answered by `Reserved`. The sequence needs `blocks` blocks at `worker_id`, which already has all
    of them or none. Forwarded from stage to stage in order with microbatches.
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
    """From the leader to `transfer.source`: send the KV of the sequence's first `blocks` blocks."""

    seq_id: str
    transfer_id: str
    transfer: Transfer
    blocks: int


@dataclass(frozen=True, slots=True)
class KvEnded:
    """To the leader: a transfer is verified at its destination (`intact`), or has failed.

    Reports a `TransferOutcome` of the destination to the leader of the group.
    """

    seq_id: str
    transfer_id: str
    intact: bool


@dataclass(frozen=True, slots=True)
class FreeKv:
    """From the leader: free the sequence's KV in layers that left the receiver's stage.

    `whole_table`: free all its blocks at the receiver, which does not run the sequence any more.
    Answered by `KvFreed`.
    """

    seq_id: str
    whole_table: bool


@dataclass(frozen=True, slots=True)
class KvFreed:
    """Answer to `FreeKv`: the KV is freed, and this member now has `capacity` blocks."""

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
