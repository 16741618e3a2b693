"""Progress of a change of groups that was asked for."""

from dataclasses import dataclass
from enum import StrEnum


class StepPhase(StrEnum):
    """See memmgr.proto."""

    PREPARING = "preparing"
    COMMITTED = "committed"
    STABLE = "stable"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Step:
    """One step; STABLE and FAILED are the last."""

    phase: StepPhase
    message: str
    epoch: int = 0
