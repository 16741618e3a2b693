"""Events that the scheduler's state machine handles, and the commands that it returns.

Every event carries its time `now_s` in seconds on the scheduler's monotonic clock. Terms: a group
is a set of workers that serve a model together; its epoch numbers its configurations. An
incarnation is the id of a worker process, new after each restart. A stream is the open RPC of a
gateway. A ticket acknowledges that a request waits in the queue.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from services.core.ask import Ask, Assignment, Proceed, Refusal, RefusalReason
from services.core.cost.model import CostModel
from services.core.report import LoadReport
from services.core.role import Role
from services.core.scheduler.buckets import BucketStats
from services.core.service import ServiceClass

BATCH_TOKENS = 2048
"""Token budget of an iteration, for a group whose leader reports none."""


@dataclass(frozen=True, slots=True)
class ServingGroup:
    """Workers that serve a model together at an epoch.

    `capacity_blocks` counts KV blocks of `block_size` token slots, over all layers;
    `max_model_len` is in tokens, prompt and output together; `max_batch_tokens` is the token budget
    of an iteration.
    """

    group_id: str
    epoch: int
    # The leader: requests go to its address.
    worker_id: str
    incarnation: str
    address: str
    model: str
    capacity_blocks: int
    block_size: int
    max_model_len: int
    # Number of workers.
    members: int = 1
    max_batch_tokens: int = BATCH_TOKENS
    # Predicts the leader's iterations as a worker alone; None if unknown.
    cost_model: CostModel | None = None
    # What the leader does best; a group of several workers is mixed.
    role: Role = Role.MIXED
    # Largest rank of an adapter that the leader loads; 0: it loads none.
    adapter_rank_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Ask):
    """A gateway requests an assignment; `waited_s` is the wait before this ask, in seconds."""

    now_s: float
    stream_id: int
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The client has cancelled the request."""

    now_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestPlaced:
    """A request has moved to another group, without an ask."""

    now_s: float
    request_id: str
    group_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class GatewayGone:
    """A gateway's stream has ended, and its grace time for a new stream is over."""

    now_s: float
    stream_id: int


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """A group serves for the first time, or in a new configuration."""

    now_s: float
    group: ServingGroup


@dataclass(frozen=True, slots=True)
class GroupLeft:
    """A group has stopped serving."""

    now_s: float
    group_id: str


@dataclass(frozen=True, slots=True)
class LoadReported:
    """A worker's load report.

    `passed_on`: a gateway received the report with the end of a request and forwarded it, so it
    does not prove that the worker is still alive.
    """

    now_s: float
    report: LoadReport
    passed_on: bool = False


@dataclass(frozen=True, slots=True)
class LoadLost:
    """A worker's report stream has ended: the worker has died, or will open another stream."""

    now_s: float
    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class ShortfallsReported:
    """KV tokens that each model lacks even if all its groups merge; absent models lack none."""

    now_s: float
    shortfalls: dict[str, int]


@dataclass(frozen=True, slots=True)
class OutcomeReported:
    """The first token of an assigned request, or with `output_tokens` its end.

    `ttft_s` counts from its arrival at the gateway. `cut_off`: its token limit, its client or an
    error ended it. Not reported for requests that failed before their first token or were started
    more than once.
    """

    now_s: float
    request_id: str
    ttft_s: float
    output_tokens: int = 0
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Ticked:
    """Periodic tick, which expires requests, reservations and remembered assignments."""

    now_s: float


Event = (
    Asked
    | Withdrawn
    | GatewayGone
    | GroupJoined
    | GroupLeft
    | LoadReported
    | LoadLost
    | ShortfallsReported
    | OutcomeReported
    | RequestPlaced
    | Ticked
)


@dataclass(frozen=True, slots=True)
class SendTicket:
    """Acknowledge to a gateway that its request waits in the queue."""

    stream_id: int
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAssignment(Assignment):
    """Send a gateway the group that runs its request."""

    stream_id: int


class WaitLimit(StrEnum):
    """What a wait is limited by."""

    COMPUTE = "compute"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Late:
    """Why a request is refused as late: its predicted wait of `wait_s` exceeds `left_s`.

    `ahead_tokens` start before the request, at `rate` per second.
    """

    ahead_tokens: int
    rate: float
    wait_s: float
    left_s: float
    by: WaitLimit


@dataclass(frozen=True, slots=True)
class LateRefusals:
    """Refusals for lateness of a model and class: their number in the last minute, and the last.

    The last refusal was `age_s` seconds ago; a retry is due `retry_after_s` after it.
    """

    model: str
    service_class: ServiceClass
    last_minute: int
    age_s: float
    last: Late
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRefusal(Refusal):
    """Send a gateway the refusal of its request; `late` if it would have been late."""

    reason: RefusalReason
    stream_id: int
    late: Late | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendProceed(Proceed):
    """Answer an estimated ask of a gateway that is not refused."""

    stream_id: int


Command = SendTicket | SendAssignment | SendRefusal | SendProceed


@dataclass(frozen=True, slots=True)
class PredictedWait:
    """Predicted seconds until the first token of a new request of a class with a short prompt.

    `optimistic_s` is exceeded with a probability of 80 %, `likely_s` with 50 %. `limit_s` is the
    longest wait of a request without a target of its own, 0 without.
    """

    model: str
    service_class: ServiceClass
    optimistic_s: float
    likely_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters and gauges of the scheduler, for metrics and heartbeats."""

    # Requests that wait, and the longest wait against a deadline.
    queued: int
    oldest_wait_s: float
    # Groups in etcd, and those with a fresh load report.
    groups_known: int
    groups_serving: int
    # KV blocks reserved for assignments that no load report includes yet.
    reserved_blocks: int
    dispatch_rate_per_s: float
    assigned_total: int
    withdrawn_total: int
    returned_total: int
    # Prompt tokens of all assignments, and the predicted prefix cache hits among them.
    prompt_tokens_total: int
    cached_tokens_total: int
    refused_total: dict[RefusalReason, int]
    queue_deadline_s: float
    # Whether gateways must send prefix hashes with their asks.
    wants_prefixes: bool
    # An entry per model that groups serve or requests wait for.
    queued_by_model: dict[str, int]
    # The next three have an entry for every class.
    queued_by_class: dict[ServiceClass, int]
    oldest_wait_s_by_class: dict[ServiceClass, float]
    refused_total_by_class: dict[ServiceClass, int]
    # Whether waits are predicted, and the predictions by model and class.
    predicts: bool = False
    class_waits: tuple[PredictedWait, ...] = ()
    # Requests refused as late, by model, class and limit; bookings of retries by how they ended,
    # and those of them that were refused as late again.
    refused_late_total: dict[tuple[str, ServiceClass, WaitLimit], int] = field(default_factory=dict)
    bookings: int = 0
    bookings_ended_total: dict[str, int] = field(default_factory=dict)
    retries_broken_total: int = 0
    # Measured over predicted times to the first token, by model and class: numbers of ratios up to
    # each bound of `BUCKETS` and above, and the sum of all ratios.
    wait_ratios: dict[tuple[str, ServiceClass], tuple[tuple[int, ...], float]] = field(
        default_factory=dict
    )
    # Buckets of the models with waiting requests.
    buckets: tuple[BucketStats, ...] = ()
    # Groups with a fresh load report, by model; 0 for a model of `queued_by_model` without any.
    serving_by_model: dict[str, int] = field(default_factory=dict)
