"""Turns workers' reports of KV blocks into the use of groups, in tokens, for the monitor."""

from collections.abc import Iterable, Mapping

from services.core.groups.vocabulary import Group
from services.core.overload.events import GroupUse, MemberUse, Reports
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport


def group_uses(
    groups: Iterable[Group], reports: Mapping[str, EngineReport], facts: Mapping[str, WorkerFacts]
) -> tuple[GroupUse, ...]:
    """The use of each group; `reports` holds fresh reports only, so silent workers have none."""
    found = []
    for group in groups:
        ids = [member.worker_id for member in group.members]
        if not ids:
            continue
        worth = _worth(group, reports, facts)
        if worth is not Reports.CURRENT:
            found.append(
                GroupUse(group.group_id, group.model, (), reports=worth, silent_ids=tuple(ids))
            )
            continue
        size = facts[ids[0]].block_size
        yielding = reports[ids[0]].load.kv_blocks_yielding  # the leader knows classes
        members = tuple(_member_use(reports[one], facts[one], yielding) for one in ids)
        waiting = sum(reports[one].load.waiting_demand for one in ids)
        wanted = sum(reports[one].load.kv_blocks_wanted for one in ids) * size
        draining = any(facts[one].draining for one in ids)
        found.append(GroupUse(group.group_id, group.model, members, waiting, wanted, draining))
    return tuple(found)


def used_tokens(report: EngineReport | None, facts: WorkerFacts) -> int:
    """Tokens of KV in use by requests that do not yield it; 0 without a report."""
    return 0 if report is None else _used_tokens(report, facts, report.load.kv_blocks_yielding)


def _used_tokens(report: EngineReport, facts: WorkerFacts, yielding: int) -> int:
    load = report.load
    return max(0, load.kv_blocks_total - load.kv_blocks_free - yielding) * facts.block_size


def _worth(
    group: Group, reports: Mapping[str, EngineReport], facts: Mapping[str, WorkerFacts]
) -> Reports:
    ids = [member.worker_id for member in group.members]
    if not all(one in reports and one in facts for one in ids):
        return Reports.SILENT
    current = all(reports[one].epoch == group.epoch for one in ids)
    return Reports.CURRENT if current else Reports.CHANGING


def _member_use(report: EngineReport, facts: WorkerFacts, yielding: int) -> MemberUse:
    size = facts.block_size
    return MemberUse(
        facts.worker_id,
        report.load.kv_blocks_total * size,
        _used_tokens(report, facts, yielding),
        facts.kv_blocks_total * size,
    )
