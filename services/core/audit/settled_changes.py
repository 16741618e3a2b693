"""Computes the durations of the changes of groups that memory managers planned, from an audit.

A change has *settled* at a member once the member serves the new group, every sequence has its
leader, and all KV has moved; engines log that in `MemoryHeld.settled`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.core.audit.audit import Audit
from services.core.audit.facts import ChangePlanned
from services.core.audit.group_history import GroupEpoch


@dataclass(frozen=True, slots=True)
class SettledChange:
    """A committed change, with durations in seconds since its plan."""

    merge: bool  # otherwise a split
    workers: int  # number of workers
    committed_s: float  # until the commit of its last group
    # Until the last member settled, in this or a later configuration; None if a member has not.
    settled_s: float | None


def settled_changes(audit: Audit) -> list[SettledChange]:
    """The committed changes in the order of their plans; changes without a commit are left out."""
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
    """For each target, the group and epoch of its first commit after the plan, if any."""
    later = sorted(
        (time_s, group_epoch)
        for group_epoch, time_s in audit.groups.committed_s.items()
        if time_s >= planned.now_s
    )
    for target in planned.targets:
        worker_ids = [stage.worker_id for stage in target]
        for _, group_epoch in later:
            members = audit.groups.configurations[group_epoch]
            if [member.worker_id for member in members] == worker_ids:
                yield group_epoch
                break


def _settled_s(audit: Audit, group_epoch: GroupEpoch) -> float | None:
    """When the last member settled, in this or a later configuration; None if not all have."""
    times_s = []
    for member in audit.groups.configurations[group_epoch]:
        engine = next((e for e in audit.engines if e.is_process_of(member)), None)
        facts = () if engine is None else engine.memory
        settled = (fact.now_s for fact in facts if fact.settled and fact.epoch >= group_epoch[1])
        times_s.append(next(settled, None))
    known_s = [time_s for time_s in times_s if time_s is not None]
    return max(known_s) if len(known_s) == len(times_s) else None
