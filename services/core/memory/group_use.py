"""From what workers report of their KV to what the monitor looks at: use of groups, in tokens."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from services.core.memory.group_vocabulary import Group
from services.core.memory.overload_events import GroupUse, MemberUse
from services.core.memory.worker_facts import WorkerFacts


class KvReport(Protocol):
    """KV blocks of a worker at one moment, and what waits there."""

    @property
    def kv_blocks_total(self) -> int: ...

    @property
    def kv_blocks_free(self) -> int: ...

    @property
    def kv_blocks_wanted(self) -> int: ...

    @property
    def waiting(self) -> int: ...


def group_uses(
    groups: Iterable[Group], reports: Mapping[str, KvReport], facts: Mapping[str, WorkerFacts]
) -> tuple[GroupUse, ...]:
    """The groups' KV; a group of which a member has not reported yet is left out."""
    found = []
    for group in groups:
        ids = [member.worker_id for member in group.members]
        if not ids or not all(one in reports and one in facts for one in ids):
            continue
        size = facts[ids[0]].block_size
        members = tuple(_member_use(reports[one], facts[one]) for one in ids)
        waiting = sum(reports[one].waiting for one in ids)
        wanted = sum(reports[one].kv_blocks_wanted for one in ids) * size
        draining = any(facts[one].draining for one in ids)
        found.append(GroupUse(group.group_id, group.model, members, waiting, wanted, draining))
    return tuple(found)


def used_tokens(report: KvReport | None, facts: WorkerFacts) -> int:
    """Tokens of KV in use; 0 without a report."""
    if report is None:
        return 0
    return (report.kv_blocks_total - report.kv_blocks_free) * facts.block_size


def _member_use(report: KvReport, facts: WorkerFacts) -> MemberUse:
    size = facts.block_size
    return MemberUse(
        facts.worker_id,
        report.kv_blocks_total * size,
        used_tokens(report, facts),
        facts.kv_blocks_total * size,
    )
