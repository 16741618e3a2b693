"""How long the changes of groups took that memory managers have planned, from the logs. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.core.audit.audit import Audit
from services.core.audit.facts import ChangePlanned
from services.core.audit.group_history import GroupEpoch


@dataclass(frozen=True, slots=True)
class SettledChange:
    """A change that was committed: a merge, or a split, of so many workers.

    Seconds from the plan on: until the commit, and until the last member had settled; None if one
    of them has not. A member that has settled in a later configuration has in this one, too.
    """

    merge: bool
    workers: int
    committed_s: float
    settled_s: float | None


def settled_changes(audit: Audit) -> list[SettledChange]:
    """The changes in the order of their plans; those that were given up are left out."""
    changes = []
    for planned in sorted(audit.groups.planned, key=lambda one: one.now_s):
        places = list(_places(audit, planned))
        if len(places) < len(planned.targets):
            continue
        ends_s = [_settled_s(audit, place) for place in places]
        known_s = [end_s for end_s in ends_s if end_s is not None]
        changes.append(
            SettledChange(
                merge=len(planned.targets) < len(planned.group_ids),
                workers=sum(map(len, planned.targets)),
                committed_s=max(map(audit.groups.committed_s.__getitem__, places)) - planned.now_s,
                settled_s=max(known_s) - planned.now_s if len(known_s) == len(ends_s) else None,
            )
        )
    return changes


def _places(audit: Audit, planned: ChangePlanned) -> Iterator[GroupEpoch]:
    """Where each target was committed first after the plan."""
    later = sorted(
        (time_s, place)
        for place, time_s in audit.groups.committed_s.items()
        if time_s >= planned.now_s
    )
    for target in planned.targets:
        names = [stage.worker_id for stage in target]
        for _, place in later:
            if [one.worker_id for one in audit.groups.configurations[place]] == names:
                yield place
                break


def _settled_s(audit: Audit, place: GroupEpoch) -> float | None:
    """When the last member had settled there, or in a later configuration; None if one has not."""
    times_s = []
    for member in audit.groups.configurations[place]:
        engine = next((one for one in audit.engines if one.is_process_of(member)), None)
        facts = () if engine is None else engine.memory
        settled = (one.now_s for one in facts if one.settled and one.epoch >= place[1])
        times_s.append(next(settled, None))
    known_s = [time_s for time_s in times_s if time_s is not None]
    return max(known_s) if len(known_s) == len(times_s) else None
