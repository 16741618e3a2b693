"""Durations of the changes of groups that memory managers planned, from the logs. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.core.audit.audit import Audit
from services.core.audit.facts import ChangePlanned
from services.core.audit.group_history import GroupEpoch


@dataclass(frozen=True, slots=True)
class SettledChange:
    """A committed change."""

    merge: bool  # otherwise a split
    workers: int
    committed_s: float  # from the plan to the commit
    # From the plan until the last member settled, here or in a later configuration; None if a
    # member has not settled.
    settled_s: float | None


def settled_changes(audit: Audit) -> list[SettledChange]:
    """The committed changes in the order of their plans."""
    changes = []
    for planned in sorted(audit.groups.planned, key=lambda change: change.now_s):
        group_epochs = list(_commits_of(audit, planned))
        if len(group_epochs) < len(planned.targets):
            continue
        ends_s = [_settled_s(audit, group_epoch) for group_epoch in group_epochs]
        known_s = [end_s for end_s in ends_s if end_s is not None]
        changes.append(
            SettledChange(
                merge=len(planned.targets) < len(planned.group_ids),
                workers=sum(map(len, planned.targets)),
                committed_s=max(map(audit.groups.committed_s.__getitem__, group_epochs))
                - planned.now_s,
                settled_s=max(known_s) - planned.now_s if len(known_s) == len(ends_s) else None,
            )
        )
    return changes


def _commits_of(audit: Audit, planned: ChangePlanned) -> Iterator[GroupEpoch]:
    """The group and epoch at which each target was first committed after the plan."""
    later = sorted(
        (time_s, group_epoch)
        for group_epoch, time_s in audit.groups.committed_s.items()
        if time_s >= planned.now_s
    )
    for target in planned.targets:
        names = [stage.worker_id for stage in target]
        for _, group_epoch in later:
            if [m.worker_id for m in audit.groups.configurations[group_epoch]] == names:
                yield group_epoch
                break


def _settled_s(audit: Audit, group_epoch: GroupEpoch) -> float | None:
    """When the last member settled, here or in a later configuration; None if not all have."""
    times_s = []
    for member in audit.groups.configurations[group_epoch]:
        engine = next((e for e in audit.engines if e.is_process_of(member)), None)
        facts = () if engine is None else engine.memory
        settled = (fact.now_s for fact in facts if fact.settled and fact.epoch >= group_epoch[1])
        times_s.append(next(settled, None))
    known_s = [time_s for time_s in times_s if time_s is not None]
    return max(known_s) if len(known_s) == len(times_s) else None
