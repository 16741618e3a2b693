"""Events and commands of the scheduler; every event carries `now_s` (seconds)."""

from dataclasses import dataclass

from services.core.ask import Ask, Assignment, Refusal, RefusalReason
from services.core.report import LoadReport
from services.core.service import ServiceClass

BATCH_TOKENS = 2048
"""Tokens of an iteration, for a group that does not tell."""


@dataclass(frozen=True, slots=True)
class ServingGroup:
    """Workers that serve together at one epoch, as far as dispatch needs to know.

    `worker_id`, `incarnation` and `address` are the leader's. `capacity_blocks` counts the KV
    blocks of `block_size` token slots that it has with all layers; `max_model_len` is in tokens,
    prompt and output together. It has so many `members`, and runs at most `max_batch_tokens` in an
    iteration.
    """

    group_id: str
    epoch: int
    worker_id: str
    incarnation: str
    address: str
    model: str
    capacity_blocks: int
    block_size: int
    max_model_len: int
    members: int = 1
    max_batch_tokens: int = BATCH_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Ask):
    """A gateway asks for a place; `waited_s` is what the request has waited before this ask."""

    now_s: float
    stream_id: int
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The client has aborted the request."""

    now_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class GatewayGone:
    """A gateway's stream has ended, and the gateway has not reconnected."""

    now_s: float
    stream_id: int


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """A group serves, or serves in another configuration than before."""

    now_s: float
    group: ServingGroup


@dataclass(frozen=True, slots=True)
class GroupLeft:
    """A group no longer serves."""

    now_s: float
    group_id: str


@dataclass(frozen=True, slots=True)
class LoadReported:
    """A worker's load at one moment.

    `passed_on`: it came with the end of a request, through the gateway that read it, and says
    nothing about whether the worker still lives.
    """

    now_s: float
    report: LoadReport
    passed_on: bool = False


@dataclass(frozen=True, slots=True)
class LoadLost:
    """A worker's reports have ended: it has died, or will report on another stream."""

    now_s: float
    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class ShortfallsTold:
    """Models that lack KV which no merge of groups can gain, in tokens; all others lack none."""

    now_s: float
    shortfalls: dict[str, int]


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed: requests expire, and reservations and remembered assignments lapse."""

    now_s: float


Event = (
    Asked
    | Withdrawn
    | GatewayGone
    | GroupJoined
    | GroupLeft
    | LoadReported
    | LoadLost
    | ShortfallsTold
    | Ticked
)


@dataclass(frozen=True, slots=True)
class SendTicket:
    """Tell a gateway that its request waits."""

    stream_id: int
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAssignment(Assignment):
    """Tell a gateway where its request runs."""

    stream_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRefusal(Refusal):
    """Tell a gateway that its request will not run."""

    reason: RefusalReason
    stream_id: int


Command = SendTicket | SendAssignment | SendRefusal


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler's state in numbers, for metrics and heartbeats."""

    queued: int
    oldest_wait_s: float
    groups_known: int
    groups_serving: int
    reserved_blocks: int
    dispatch_rate_per_s: float
    assigned_total: int
    withdrawn_total: int
    returned_total: int
    # Prompt tokens of all assignments, and those expected to be in the prefix cache of the group.
    prompt_tokens_total: int
    cached_tokens_total: int
    refused_total: dict[RefusalReason, int]
    queue_deadline_s: float
    # Whether asks need their prefix.
    wants_prefixes: bool
    # Every model that groups serve has an entry, and so has any other with waiting requests.
    queued_by_model: dict[str, int]
    # Every class has an entry in each.
    queued_by_class: dict[ServiceClass, int]
    oldest_wait_s_by_class: dict[ServiceClass, float]
    refused_total_by_class: dict[ServiceClass, int]
