"""Configuration, events and decisions of the overload monitor (`OverloadMonitor`).

`now_s` is the monotonic time in seconds. KV is counted in tokens. *Undropped capacity*: the KV
capacity if every worker held all layers. *Dwell time*: how long a condition must hold before a
decision.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.core.demand import ModelDemand
from services.core.setting import computed, number, option, seconds


class Action(StrEnum):
    """The action that a decision requests."""

    MERGE = "merge"
    SPLIT = "split"
    # Cancel a split that is still being prepared, since load has returned.
    CALL_OFF = "call_off"
    # Report that all possible merges together cannot meet the demand: add workers.
    EXHAUSTED = "exhausted"
    # Move running requests between two groups with their KV; no group changes.
    MOVE = "move"


class OverloadPolicy(StrEnum):
    """The memory manager's response to overload: drop layers, or leave it to recomputation.

    STATIC_PIPELINE drops layers from the start instead (`static_pipelines.py`). MIGRATE moves
    running requests to groups with room, and drops nothing (Llumnix).
    """

    DROP = "drop"
    RECOMPUTE = "recompute"
    STATIC_PIPELINE = "static-pipeline"
    MIGRATE = "migrate"


class Rebalance(StrEnum):
    """When running requests move to other groups with their KV (`rebalance.py`)."""

    OFF = "off"
    # Away from groups that lack KV, before groups merge for them.
    STUCK = "stuck"
    # Also to let a large queued request start.
    ALL = "all"


class Cause(StrEnum):
    """Trigger of a decision."""

    OVERLOAD = "overload"
    SUBSIDED = "subsided"
    MANUAL = "manual"
    # A member is shutting down: split its group so that the other members continue.
    DRAINING = "draining"
    # The policy static-pipeline merges workers that were never merged.
    START = "start"
    # A group lacks KV while others have room.
    FULL = "full group"
    # A queued request is larger than the free KV of each group.
    LARGE = "large request"
    # Requests are spread unevenly (policy `migrate`).
    UNEVEN = "uneven"


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """Thresholds and times of the monitor; times in seconds."""

    policy: OverloadPolicy = computed(OverloadPolicy.DROP)
    rebalance: Rebalance | None = computed(None)  # None: see `moves`
    overload_dwell_s: float = seconds(0.2)  # overload must last this long before a merge
    split_dwell_s: float = seconds(5.0)  # low demand must last this long before a split
    split_dwell_max_s: float = seconds(80.0)  # limit of the doubling after regretted splits
    # Demand below this share of the undropped capacity has subsided. The margin is wide, so that a
    # split does not cause the next overload.
    subsided_share: float = number(0.5, minimum=0, maximum=1)
    partial_splits: bool = option(True)  # groups may split into smaller merged groups
    lookahead_s: float = seconds(1.0)  # horizon of the demand forecast
    smoothing_s: float = seconds(2.0, minimum=0.001)  # time constant of the rates
    settle_s: float = seconds(5.0)  # time for a decision to take effect, before the next
    report_s: float = seconds(1.0)  # time for reports to reflect changed groups
    regret_s: float = seconds(30.0)  # overload this soon after a split doubles the dwell time
    calm_s: float = seconds(5.0)  # time without overload that ends a shortfall
    manual_hold_s: float = seconds(30.0)  # time for which a manual change is not reverted
    # Rising demand (`demand_trend.py`): so many periods with a rise, each by at least this share of
    # the undropped capacity.
    trend_period_s: float = seconds(4.0, minimum=0.001)
    trend_periods: int = number(6, minimum=1, maximum=1000)
    trend_share: float = number(0.03, minimum=0, maximum=1)

    @property
    def moves(self) -> Rebalance:
        """When requests move: `migrate` moves them in every case; by default only `drop` does."""
        if self.policy is OverloadPolicy.MIGRATE:
            return Rebalance.ALL
        default = Rebalance.STUCK if self.policy is OverloadPolicy.DROP else Rebalance.OFF
        return default if self.rebalance is None else self.rebalance


@dataclass(frozen=True, slots=True)
class MemberUse:
    """KV of a member in tokens; `unmerged_tokens`: its capacity with all layers resident."""

    worker_id: str
    total_tokens: int
    used_tokens: int
    unmerged_tokens: int


@dataclass(frozen=True, slots=True)
class PartialSplit:
    """A possible split of a group into `parts` groups, at least one of them merged.

    It is possible while the group's KV in use is at most `limit_tokens`: before the split, each
    member makes room for its new layers but still stores the KV of all requests of the group.
    """

    parts: int
    limit_tokens: int
    capacity_tokens: int  # total of the new groups


class ReportStatus(StrEnum):
    """Whether the reports of a group's members describe its current configuration."""

    CURRENT = "current"
    # A member reports another epoch than the group's record: a change is in progress.
    CHANGING = "changing"
    # A member has not reported lately, or never: it may hang.
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class GroupUse:
    """KV usage of a serving group.

    `members` has their usage if `report_status` is CURRENT; otherwise `silent_ids` has their ids.
    `waiting` requests at workers need `waiting_tokens` of KV to start. `draining`: a member is
    shutting down. `partial_splits`: most parts first; each has a higher limit than the one before.
    `whole_reason`: why a group of three or more has none, or that reports are not CURRENT.
    `running` requests have KV that counts as used. Running requests can move between groups with
    equal `kv_layout`, "" for groups that can move none.
    """

    group_id: str
    model: str
    members: tuple[MemberUse, ...]
    waiting: int = 0
    waiting_tokens: int = 0
    draining: bool = False
    report_status: ReportStatus = ReportStatus.CURRENT
    silent_ids: tuple[str, ...] = ()
    partial_splits: tuple[PartialSplit, ...] = ()
    whole_reason: str = ""
    running: int = 0
    kv_layout: str = ""

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Ids of all members."""
        return self.silent_ids or tuple(member.worker_id for member in self.members)

    @property
    def capacity_tokens(self) -> int:
        """Capacity of the smallest stage, which limits the group."""
        return min(member.total_tokens for member in self.members)

    @property
    def used_tokens(self) -> int:
        """Usage of the fullest stage; each stage has the KV of all requests, in its layers."""
        return max(member.used_tokens for member in self.members)

    @property
    def stuck_tokens(self) -> int:
        """KV that the group's requests need beyond its capacity; they cannot run elsewhere."""
        return max(0, self.used_tokens + self.waiting_tokens - self.capacity_tokens)

    @property
    def can_split(self) -> bool:
        """Whether the group is merged, and its KV in use fits at each member alone."""
        return len(self.members) > 1 and self.used_tokens <= self.unmerged_tokens

    @property
    def unmerged_tokens(self) -> int:
        """Capacity of the smallest member with all layers resident."""
        return min(member.unmerged_tokens for member in self.members)

    @property
    def partial_split(self) -> PartialSplit | None:
        """The split into the most merged groups for which its KV in use fits at each member."""
        fits = (split for split in self.partial_splits if self.used_tokens <= split.limit_tokens)
        return next(fits, None)


@dataclass(frozen=True, slots=True)
class GroupsSeen:
    """The usage of all serving groups, from their workers' latest reports."""

    now_s: float
    groups: tuple[GroupUse, ...]


@dataclass(frozen=True, slots=True)
class DemandReported:
    """The schedulers' queues by model; a missing model has an empty queue."""

    now_s: float
    demands: tuple[ModelDemand, ...]


@dataclass(frozen=True, slots=True)
class ManualChange:
    """An operator merged (MERGE) or split (SPLIT) groups; not reverted for `manual_hold_s`.

    `parts` as in `Decision`; smaller merged groups of a split are not split further for that time.
    """

    now_s: float
    model: str
    action: Action
    group_ids: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MergesPlanned:
    """Outcome of planning a merge: `short_tokens` of KV are missing after all merges."""

    now_s: float
    model: str
    short_tokens: int


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """A MOVE decision was executed: `moved` requests have left `group_ids[0]` for the other.

    `moved` is None if it was not executed, because another memory manager leads or none does yet.
    """

    now_s: float
    model: str
    group_ids: tuple[str, str]
    moved: int | None


Event = GroupsSeen | DemandReported | ManualChange | MergesPlanned | MoveEnded


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Demand and capacity of a model, in tokens of KV."""

    demand_tokens: int  # the sum of used, waiting, queued and refused tokens
    forecast_tokens: int  # predicted net growth of demand within the look-ahead
    capacity_tokens: int  # of all groups as they are now
    undropped_tokens: int  # capacity with all layers of all workers restored
    used_tokens: int  # by running requests
    waiting_tokens: int  # needed by requests that wait at workers
    queued_tokens: int  # needed by the scheduler's queue
    refused_tokens: int  # of requests refused lately, which clients retry
    waiting: int  # requests that wait, are queued or were refused
    stuck_tokens: int = 0  # demand at full groups beyond their capacity, sum of all groups

    @property
    def expected_tokens(self) -> int:
        """Demand predicted for the end of the look-ahead."""
        return self.demand_tokens + self.forecast_tokens

    @property
    def short_tokens(self) -> int:
        """Missing capacity of the model or of its full groups; at most 0 if there is enough."""
        return max(self.expected_tokens - self.capacity_tokens, self.stuck_tokens)


@dataclass(frozen=True, slots=True)
class DecisionReason:
    """Why a decision was made: demand was beyond the threshold for `held_s`, at least `dwell_s`.

    `moves_help`: moves of running requests may still end that groups are full.
    """

    cause: Cause
    threshold_tokens: int
    held_s: float
    dwell_s: float
    load: ModelLoad
    moves_help: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the monitor about a model.

    MERGE: gain `needed_tokens` of KV; with `group_ids`, merge these full groups with groups that
    have free memory, or, if the cause is START, with each other in pairs. SPLIT: split `group_ids`
    into `parts` groups each; into single workers if `parts` is empty. CALL_OFF: cancel the split of
    `group_ids`. EXHAUSTED: `needed_tokens` are missing. MOVE: running requests with at most
    `needed_tokens` of KV move from the first of `group_ids` to the second, at most `requests_max`;
    0: no limit. For a manual change, `group_ids` are the groups that were merged or split.
    """

    now_s: float
    model: str
    action: Action
    reason: DecisionReason
    needed_tokens: int = 0
    group_ids: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    requests_max: int = 0

    @property
    def parts_of(self) -> dict[str, int]:
        """Number of new groups, by group that splits into merged groups."""
        return dict(zip(self.group_ids, self.parts, strict=False))
