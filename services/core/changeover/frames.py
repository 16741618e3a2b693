"""Messages between the members of a group, by which a change-over is carried out.

The way between two members keeps their order, on which much here relies. A stage applies the
microbatches of its leader in order, so that all stages agree on how many blocks each request has.
No frame of a new configuration overtakes the last microbatch of the old one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.core.changeover.route import Transfer
from services.core.groups.layer_map import Stage
from services.core.planner.batch import Microbatch, PromptScore, SampleNotes, SampleSpec
from services.core.planner.sequence import SequenceState
from services.core.prefix.news import PrefixNews


class StageChunk(NamedTuple):
    """A chunk as a later stage needs it: no token ids, and `blocks` instead of block ids.

    `tokens` tokens at positions `start` onwards; the request's table covers `blocks` blocks.
    `sample` and `score` are for the last stage. A request's terms are sent once, with its first
    token in a configuration or after it was preempted, so later frames are small.
    """

    request_id: str
    start: int
    tokens: int
    blocks: int
    sample: SampleSpec | None
    score: PromptScore | None = None


@dataclass(frozen=True, slots=True)
class Activations:
    """From stage to stage: run this microbatch. The payload is hidden [tokens, hidden_size].

    `released` are the requests whose blocks are free before it runs. Without chunks there is
    nothing to run and no payload. `vacant_s` is for how long the pipeline had nothing in flight
    before it. `prefixes` as in `Microbatch`.
    """

    number: int
    released: tuple[str, ...]
    chunks: tuple[StageChunk, ...]
    vacant_s: float = 0.0
    prefixes: PrefixNews | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """From the last stage to the leader: the tokens sampled in microbatch `number`.

    `notes`: what else there is, as in `IterationFinished`.
    """

    number: int
    tokens: Mapping[str, int]
    notes: SampleNotes | None = None


@dataclass(frozen=True, slots=True)
class Drained:
    """From the leader of a configuration that ends: nothing of it is in flight any more.

    `released` as in `Activations`.
    """

    released: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """To the leader: this member has switched to the envelope's epoch.

    It has `capacity` blocks, of which `used` belong to requests that came with it.
    """

    capacity: int
    used: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """To the leader: this member has `blocks` blocks.

    If they are fewer, to make room for parameters, `attempt` names the preparation, and the leader
    answers with `CapacityKept` once no more are in use.
    """

    blocks: int
    attempt: str = ""


@dataclass(frozen=True, slots=True)
class CapacityKept:
    """From the leader: `worker_id` uses no more blocks than it announced for `attempt`.

    It goes from stage to stage, and carries what was `released`, as `Reserve` does.
    """

    worker_id: str
    attempt: str
    released: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    """To the leader: `blocks` blocks are free that belonged to requests of another leader."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """From a request's old leader to its new one: take the request over.

    `stages` held its KV until now (none if it has no blocks); `origin` names their group.
    `highest_block` is the largest block id of it at the sender. `age_s` is the time since it
    arrived, because clocks of different hosts cannot be compared.
    """

    sequence: SequenceState
    origin: str
    stages: tuple[Stage, ...]
    highest_block: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Adopted:
    """To the old leader: the request's tokens come from here from `next_index` on."""

    request_id: str
    next_index: int


@dataclass(frozen=True, slots=True)
class RequestDropped:
    """From the old leader of an adopted request: it was aborted."""

    request_id: str


@dataclass(frozen=True, slots=True)
class AllAdopted:
    """From an old leader: no `Adopt` of the envelope's epoch follows.

    From the leader of a configuration that ends to its stages: no `Adopted` follows either.
    """


@dataclass(frozen=True, slots=True)
class AllMoved:
    """From `leader`: it has all sequences of this change that it will have, and their KV.

    It goes to members of other groups, and from stage to stage through its own. `kept`, told to
    its own stages alone, are its sequences and those whose release they have yet to hear of.
    """

    leader: str
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Farewell:
    """To a former member: the sender goes on without it, in a later configuration."""


@dataclass(frozen=True, slots=True)
class Passed:
    """From a member of the change: it has left the envelope's epoch, or will never enter it.

    It sends no more frames of this epoch, it ignores those that it gets, and KV that it was to send
    is computed again.
    """


@dataclass(frozen=True, slots=True)
class Reserve:
    """From the leader: expect these transfers of the request's KV; answered by `Reserved`.

    It needs `blocks` blocks in all at `worker_id`, which may have all or none. It goes from stage
    to stage as microbatches do, and carries what was `released` since the last one: the leader
    counts on those blocks.
    """

    worker_id: str
    request_id: str
    blocks: int
    transfer_ids: tuple[str, ...]
    released: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """To the leader: the blocks are there."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SendKv:
    """From the leader to `transfer.source`: send the KV of the request's first `blocks` blocks."""

    request_id: str
    transfer_id: str
    transfer: Transfer
    blocks: int


@dataclass(frozen=True, slots=True)
class KvEnded:
    """To the leader: a transfer is complete and verified at its destination, or has failed."""

    request_id: str
    transfer_id: str
    intact: bool


@dataclass(frozen=True, slots=True)
class FreeKv:
    """From the leader: the request's departing KV is not needed any more; answered by `KvFreed`.

    `whole_table`: the member frees all blocks of the request, not only departing layers.
    """

    request_id: str
    whole_table: bool


@dataclass(frozen=True, slots=True)
class KvFreed:
    """To the leader: the KV is freed; this member has `capacity` blocks now."""

    request_id: str
    capacity: int


MemberFrame = (
    Activations
    | Samples
    | Drained
    | Joined
    | Capacity
    | CapacityKept
    | Credit
    | Adopt
    | Adopted
    | RequestDropped
    | AllAdopted
    | AllMoved
    | Passed
    | Farewell
    | Reserve
    | Reserved
    | SendKv
    | KvEnded
    | FreeKv
    | KvFreed
)


def activations(microbatch: Microbatch, vacant_s: float) -> Activations:
    """The header that later stages get with a microbatch's hidden states."""
    return Activations(
        microbatch.number,
        microbatch.released,
        tuple(
            StageChunk(
                chunk.request_id,
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
