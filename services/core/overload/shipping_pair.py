"""Chooses the groups between which running requests move with their KV."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.core.groups.vocabulary import Group
from services.core.overload.manual_change import InvalidChange
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import MemoryReport


@dataclass(frozen=True, slots=True)
class ShippingPair:
    """Two groups of one worker each; requests move from `source` to `target`."""

    source: Group
    target: Group


def pair_of(
    groups: Sequence[Group],
    facts: Mapping[str, WorkerFacts],
    reports: Mapping[str, MemoryReport],
    source_id: str,
    target_id: str = "",
) -> ShippingPair:
    """The groups of the workers `source_id` and `target_id`; "": the one with most free KV.

    `groups` are those that serve; `facts` and `reports` are by worker id.

    Raises:
        InvalidChange: if requests cannot move between them with their KV.
    """
    source = _alone(groups, source_id)
    if target_id:
        target = _alone(groups, target_id)
        obstacle = _obstacle(source_id, target_id, facts)
        if obstacle:
            raise InvalidChange(obstacle)
        return ShippingPair(source, target)
    others = list(targets_of(groups, facts, source_id))
    if not others:
        raise InvalidChange(
            f"no other worker can take requests of {source_id} with their KV: it must be alone in"
            " its group, run the same model and code, and not shut down"
        )
    return ShippingPair(source, max(others, key=lambda group: _free_blocks(group, reports)))


def targets_of(
    groups: Iterable[Group], facts: Mapping[str, WorkerFacts], source_id: str
) -> Iterable[Group]:
    """The groups to which requests of a worker can move with their KV."""
    for group in groups:
        (member, *others) = group.members
        if not (others or group.attempt or _obstacle(source_id, member.worker_id, facts)):
            yield group


def _free_blocks(group: Group, reports: Mapping[str, MemoryReport]) -> int:
    report = reports.get(group.members[0].worker_id)
    return -1 if report is None else report.engine.load.kv_blocks_free


def _alone(groups: Iterable[Group], worker_id: str) -> Group:
    """The group that consists of this worker. Raises InvalidChange."""
    for group in groups:
        if worker_id in {member.worker_id for member in group.members}:
            if len(group.members) > 1:
                raise InvalidChange(
                    f"{worker_id} is merged with others in {group.group_id}; requests move only"
                    " between single workers: split the group with `tideserve restore`"
                )
            if group.attempt:
                raise InvalidChange(f"{group.group_id} is about to change; retry in some seconds")
            return group
    raise InvalidChange(f"no group with worker '{worker_id}' serves; see `tideserve status`")


def _obstacle(source_id: str, target_id: str, facts: Mapping[str, WorkerFacts]) -> str:
    """Why KV cannot be shipped between two workers; "" if it can."""
    source, target = facts.get(source_id), facts.get(target_id)
    if source_id == target_id:
        return "source and target are the same worker; name another target"
    if source is None or target is None:
        return f"{source_id if source is None else target_id} is not registered"
    if not (source.can_drop and target.can_drop):
        return (
            f"{source_id} and {target_id} are not both able to send KV to other workers; see"
            " `tideserve status`"
        )
    if target.draining:
        return f"{target_id} is leaving; name another worker"
    for what in ("model", "model_digest", "build", "block_size"):
        if getattr(source, what) != getattr(target, what) or not getattr(source, what):
            pair = f"{source_id} and {target_id}"
            return f"{pair} do not run the same {_WORDS[what]}; name workers that do"
    return ""


_WORDS = {
    "model": "model",
    "model_digest": "weights",
    "build": "version of the code",
    "block_size": "size of KV blocks",
}
