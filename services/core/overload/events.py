"""Events and decisions of the overload monitor; every event carries `now_s` (seconds)."""

from dataclasses import dataclass
from enum import StrEnum

from services.core.demand import ModelDemand
from services.core.setting import computed, number, seconds


class Action(StrEnum):
    """What a decision asks for."""

    MERGE = "merge"
    SPLIT = "split"
    # A split that is being prepared is given up, since load has returned.
    CALL_OFF = "call_off"
    # Demand that all merges together cannot meet: more instances are needed.
    EXHAUSTED = "exhausted"


class OverloadPolicy(StrEnum):
    """How the memory manager answers overload."""

    DROP = "drop"
    RECOMPUTE = "recompute"


class Cause(StrEnum):
    """Why a decision was made."""

    OVERLOAD = "overload"
    SUBSIDED = "subsided"
    MANUAL = "manual"
    # A member of a group is leaving; the others go on without it.
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """Thresholds and times of the monitor.

    `subsided_share` of the undropped capacity is below what a restored group holds, and far below
    what makes it overflow. `settle_s`: how long a decision has to show in the groups before it is
    made again; `report_s`: how long the groups' reports take to show it. A split that is followed
    by overload within `regret_s` doubles the dwell time of the next, up to `split_dwell_max_s`.
    `calm_s`: how long an overload has to be over before a shortfall is.
    `manual_hold_s`: for how long a change by hand stands.
    """

    policy: OverloadPolicy = computed(OverloadPolicy.DROP)
    overload_dwell_s: float = seconds(0.2)
    split_dwell_s: float = seconds(5.0)
    split_dwell_max_s: float = seconds(80.0)
    subsided_share: float = number(0.5, minimum=0, maximum=1)
    lookahead_s: float = seconds(1.0)
    smoothing_s: float = seconds(2.0, minimum=0.001)
    settle_s: float = seconds(5.0)
    report_s: float = seconds(1.0)
    regret_s: float = seconds(30.0)
    calm_s: float = seconds(5.0)
    manual_hold_s: float = seconds(30.0)


@dataclass(frozen=True, slots=True)
class MemberUse:
    """KV of one member in tokens; `unmerged_tokens` is what it holds with all layers resident."""

    worker_id: str
    total_tokens: int
    used_tokens: int
    unmerged_tokens: int


class ReportStatus(StrEnum):
    """What the reports of a group's members are worth now."""

    CURRENT = "current"
    # A member reports of another configuration: a change of the group is not over.
    CHANGING = "changing"
    # A member has not reported lately, or never: it may be frozen.
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class GroupUse:
    """A group that serves; unless `report_status` is current it has `silent_ids`, not `members`.

    `waiting` requests need `waiting_tokens` of KV before they can run. `draining`: a member is
    leaving.
    """

    group_id: str
    model: str
    members: tuple[MemberUse, ...]
    waiting: int = 0
    waiting_tokens: int = 0
    draining: bool = False
    report_status: ReportStatus = ReportStatus.CURRENT
    silent_ids: tuple[str, ...] = ()

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Ids of all members, whether or not they have numbers."""
        return self.silent_ids or tuple(member.worker_id for member in self.members)

    @property
    def capacity_tokens(self) -> int:
        """What the smallest stage holds."""
        return min(member.total_tokens for member in self.members)

    @property
    def used_tokens(self) -> int:
        """What the fullest stage holds: each has all requests, in its own layers."""
        return max(member.used_tokens for member in self.members)

    @property
    def stuck_tokens(self) -> int:
        """KV that its own requests need beyond its capacity."""
        return max(0, self.used_tokens + self.waiting_tokens - self.capacity_tokens)

    @property
    def can_split(self) -> bool:
        """Whether its KV in use fits into each member alone; requests that wait do not count."""
        least = min(member.unmerged_tokens for member in self.members)
        return len(self.members) > 1 and self.used_tokens <= least


@dataclass(frozen=True, slots=True)
class GroupsSeen:
    """All groups that serve, as far as their workers report them."""

    now_s: float
    groups: tuple[GroupUse, ...]


@dataclass(frozen=True, slots=True)
class DemandReported:
    """The scheduler's queue, by model; a model that is missing has no queue."""

    now_s: float
    demands: tuple[ModelDemand, ...]


@dataclass(frozen=True, slots=True)
class ManualChange:
    """Somebody has merged (MERGE) or split (SPLIT) groups; that stands for a while."""

    now_s: float
    model: str
    action: Action
    group_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MergesPlanned:
    """A decision to merge was planned: `short_tokens` of KV are lacking still after all merges."""

    now_s: float
    model: str
    short_tokens: int


Event = GroupsSeen | DemandReported | ManualChange | MergesPlanned


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Demand and capacity of a model, in tokens of KV.

    `stuck_tokens` of the demand are bound to groups that have no room for them, whatever room other
    groups have.
    """

    demand_tokens: int
    forecast_tokens: int
    capacity_tokens: int
    undropped_tokens: int
    used_tokens: int
    waiting_tokens: int
    queued_tokens: int
    refused_tokens: int
    waiting: int
    stuck_tokens: int = 0

    @property
    def expected_tokens(self) -> int:
        """Demand at the end of the look-ahead."""
        return self.demand_tokens + self.forecast_tokens

    @property
    def short_tokens(self) -> int:
        """What is missing, over all groups or in full ones; 0 or less if nothing is."""
        return max(self.expected_tokens - self.capacity_tokens, self.stuck_tokens)


@dataclass(frozen=True, slots=True)
class DecisionReason:
    """Why a decision was made: the threshold in tokens, and how long it was exceeded."""

    cause: Cause
    threshold_tokens: int
    held_s: float
    dwell_s: float
    numbers: ModelLoad


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision: merges have to gain `needed_tokens` of KV, or `group_ids` split, or do not.

    A merge with `group_ids` is for these groups, which are full while others have room. After a
    change by hand `group_ids` are the groups that were merged or split.
    """

    now_s: float
    model: str
    action: Action
    why: DecisionReason
    needed_tokens: int = 0
    group_ids: tuple[str, ...] = ()
