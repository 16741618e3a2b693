"""Messages between the members of a group on the activation lane.

The lane keeps the order between two members, on which much here relies. A stage applies the
microbatches of its leader in order, so that all stages agree on how many blocks each request has.
No frame of a new configuration overtakes the last microbatch of the old one.
"""

from typing import get_args

import msgspec

from services.core.changeover.route import Transfer
from services.core.groups.layer_map import Stage
from services.core.planner.batch import PromptScore, SampleNotes, SampleSpec
from services.core.planner.sequence import SequenceState


class StageChunk(msgspec.Struct, array_like=True, frozen=True):
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


class Activations(msgspec.Struct, tag=0x200, frozen=True):
    """From stage to stage: run this microbatch. The payload is hidden [tokens, hidden_size].

    `released` are the requests whose blocks are free before it runs. Without chunks there is
    nothing to run and no payload. `vacant_s` is for how long the pipeline had nothing in flight
    before it.
    """

    number: int
    released: tuple[str, ...]
    chunks: tuple[StageChunk, ...]
    vacant_s: float = 0.0


class Samples(msgspec.Struct, tag=0x201, frozen=True):
    """From the last stage to the leader: the tokens sampled in microbatch `number`.

    `notes`: what else there is, as in `IterationFinished`.
    """

    number: int
    tokens: dict[str, int]
    notes: SampleNotes | None = None


class Drained(msgspec.Struct, tag=0x202, frozen=True):
    """From the leader of a configuration that ends: nothing of it is in flight any more.

    `released` as in `Activations`.
    """

    released: tuple[str, ...]


class Joined(msgspec.Struct, tag=0x203, frozen=True):
    """To the leader: this member has switched to the envelope's epoch.

    It has `capacity` blocks, of which `used` belong to requests that came with it.
    """

    capacity: int
    used: int


class Capacity(msgspec.Struct, tag=0x204, frozen=True):
    """To the leader: this member has `blocks` blocks.

    Perhaps fewer than before, to make room for parameters: then `attempt` says for which
    preparation, and the leader answers with `CapacityKept` once no more are in use.
    """

    blocks: int
    attempt: str = ""


class CapacityKept(msgspec.Struct, tag=0x205, frozen=True):
    """From the leader: `worker_id` uses no more blocks than it announced for `attempt`.

    It goes from stage to stage, and carries what was `released`, as `Reserve` does.
    """

    worker_id: str
    attempt: str
    released: tuple[str, ...]


class Credit(msgspec.Struct, tag=0x206, frozen=True):
    """To the leader: `blocks` blocks are free that belonged to requests of another leader."""

    blocks: int


class Adopt(msgspec.Struct, tag=0x207, frozen=True):
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


class Adopted(msgspec.Struct, tag=0x208, frozen=True):
    """To the old leader: the request's tokens come from here from `next_index` on."""

    request_id: str
    next_index: int


class GivenUp(msgspec.Struct, tag=0x212, frozen=True):
    """From the old leader of an adopted request: it was aborted."""

    request_id: str


class AllAdopted(msgspec.Struct, tag=0x209, frozen=True):
    """From an old leader: no `Adopt` of the envelope's epoch follows."""


class Reserve(msgspec.Struct, tag=0x20A, frozen=True):
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


class Reserved(msgspec.Struct, tag=0x20B, frozen=True):
    """To the leader: the blocks are there."""

    request_id: str


class SendKv(msgspec.Struct, tag=0x20C, frozen=True):
    """From the leader to `transfer.source`: send the KV of the request's first `blocks` blocks."""

    request_id: str
    transfer_id: str
    transfer: Transfer
    blocks: int


class KvEnded(msgspec.Struct, tag=0x20D, frozen=True):
    """To the leader: a transfer is complete and verified at its destination, or has failed."""

    request_id: str
    transfer_id: str
    intact: bool


class FreeKv(msgspec.Struct, tag=0x20E, frozen=True):
    """From the leader: the request's departing KV is not needed any more; answered by `KvFreed`.

    `whole_table`: nor is the rest of what this member holds of it.
    """

    request_id: str
    whole_table: bool


class KvFreed(msgspec.Struct, tag=0x20F, frozen=True):
    """To the leader: the KV is freed; this member has `capacity` blocks now."""

    request_id: str
    capacity: int


class FetchSlab(msgspec.Struct, tag=0x210, frozen=True):
    """Send the parameters of `slab` as transfer `transfer_id`; the sender's digest must match."""

    slab: str
    transfer_id: str
    digest: str


class FetchRefused(msgspec.Struct, tag=0x211, frozen=True):
    """Refusal: this member lacks the slab, or has other parameters under its name."""

    slab: str
    transfer_id: str


Body = (
    Activations
    | Samples
    | Drained
    | Joined
    | Capacity
    | CapacityKept
    | Credit
    | Adopt
    | Adopted
    | GivenUp
    | AllAdopted
    | Reserve
    | Reserved
    | SendKv
    | KvEnded
    | FreeKv
    | KvFreed
    | FetchSlab
    | FetchRefused
)
KINDS: tuple[type[msgspec.Struct], ...] = get_args(Body)
