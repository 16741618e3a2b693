"""Turns workers' reports of KV blocks into the use of groups, in tokens, for the monitor."""

from collections.abc import Iterable, Mapping, Sequence

from services.core.groups.vocabulary import Group
from services.core.overload.events import GroupUse, MemberUse, ReportStatus
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
        if worth is not ReportStatus.CURRENT:
            found.append(
                GroupUse(
                    group.group_id, group.model, (), report_status=worth, silent_ids=tuple(ids)
                )
            )
            continue
        size = facts[ids[0]].block_size
        members = _member_uses(ids, reports, facts)
        waiting = sum(reports[one].load.waiting_demand for one in ids)
        wanted = sum(reports[one].load.kv_blocks_wanted for one in ids) * size
        draining = any(facts[one].draining for one in ids)
        found.append(GroupUse(group.group_id, group.model, members, waiting, wanted, draining))
    return tuple(found)


def used_tokens(report: EngineReport | None, facts: WorkerFacts) -> int:
    """Tokens of KV in use by requests that do not yield it; 0 without a report."""
    if report is None:
        return 0
    load = report.load
    used_blocks = load.kv_blocks_total - load.kv_blocks_free - load.kv_blocks_yielding
    return max(0, used_blocks) * facts.block_size


def _worth(
    group: Group, reports: Mapping[str, EngineReport], facts: Mapping[str, WorkerFacts]
) -> ReportStatus:
    ids = [member.worker_id for member in group.members]
    if not all(one in reports and one in facts for one in ids):
        return ReportStatus.SILENT
    current = all(reports[one].epoch == group.epoch for one in ids)
    return ReportStatus.CURRENT if current else ReportStatus.CHANGING


def _member_uses(
    ids: Sequence[str], reports: Mapping[str, EngineReport], facts: Mapping[str, WorkerFacts]
) -> tuple[MemberUse, ...]:
    """What each member holds and uses; the first one leads.

    Only the leader knows which blocks are of batch work, and it counts those of all stages. Where
    batch work yields, its count is that of each: reports of members are of different moments, and
    batch KV that has come or gone in between would look like that of online requests.
    """
    counts = [reports[ids[0] if reports[ids[0]].load.batch_yields else one] for one in ids]
    return tuple(
        MemberUse(
            one,
            reports[one].load.kv_blocks_total * facts[one].block_size,
            used_tokens(counted, facts[one]),
            facts[one].kv_blocks_total * facts[one].block_size,
        )
        for one, counted in zip(ids, counts, strict=True)
    )
