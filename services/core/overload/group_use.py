"""Converts workers' reports of KV blocks into the usage of groups in tokens (`GroupUse`)."""

from collections.abc import Iterable, Mapping, Sequence

from services.core.groups.vocabulary import Group
from services.core.overload.events import GroupUse, MemberUse, ReportStatus
from services.core.overload.partial_split import partial_splits_of
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport, Load


def group_uses(
    groups: Iterable[Group], reports: Mapping[str, EngineReport], facts: Mapping[str, WorkerFacts]
) -> tuple[GroupUse, ...]:
    """Usage of each group. `reports`: recent reports by worker, without silent workers."""
    usages = []
    for group in groups:
        ids = [member.worker_id for member in group.members]
        if not ids:
            continue
        status = _report_status(group, reports, facts)
        if status is not ReportStatus.CURRENT:
            usages.append(
                GroupUse(
                    group.group_id,
                    group.model,
                    (),
                    report_status=status,
                    silent_ids=tuple(ids),
                    whole_reason=_unknown(ids, reports, facts),
                )
            )
            continue
        size = facts[ids[0]].block_size
        members = _member_uses(ids, reports, facts)
        waiting = sum(reports[worker_id].load.waiting_demand for worker_id in ids)
        wanted = sum(reports[worker_id].load.kv_blocks_wanted for worker_id in ids) * size
        draining = any(facts[worker_id].draining for worker_id in ids)
        partial_splits, whole_reason = partial_splits_of(group, facts)
        usages.append(
            GroupUse(
                group.group_id,
                group.model,
                members,
                waiting,
                wanted,
                draining,
                partial_splits=partial_splits,
                whole_reason=whole_reason,
                running=_running(reports[ids[0]].load),
                kv_layout=_kv_layout(group, facts),
            )
        )
    return tuple(usages)


def _running(load: Load) -> int:
    """Running requests whose KV counts as used."""
    return load.running - load.batch_running if load.batch_yields else load.running


def _kv_layout(group: Group, facts: Mapping[str, WorkerFacts]) -> str:
    """What groups must agree in to move requests with their KV; "" if a group can move none.

    As `shipping_pair.py`: a single worker that can send KV, without a change in progress.
    """
    worker = facts[group.members[0].worker_id]
    known = worker.can_drop and worker.model_digest and worker.build
    if len(group.members) > 1 or group.attempt or not known:
        return ""
    return " ".join([worker.model_digest, worker.build, str(worker.block_size)])


def used_tokens(report: EngineReport | None, facts: WorkerFacts) -> int:
    """Tokens of KV in use, without KV of preemptible batch work; 0 without a report."""
    if report is None:
        return 0
    load = report.load
    used_blocks = load.kv_blocks_total - load.kv_blocks_free - load.kv_blocks_yielding
    return max(0, used_blocks) * facts.block_size


def _report_status(
    group: Group, reports: Mapping[str, EngineReport], facts: Mapping[str, WorkerFacts]
) -> ReportStatus:
    ids = [member.worker_id for member in group.members]
    if not all(worker_id in reports and worker_id in facts for worker_id in ids):
        return ReportStatus.SILENT
    current = all(reports[worker_id].epoch == group.epoch for worker_id in ids)
    return ReportStatus.CURRENT if current else ReportStatus.CHANGING


def _unknown(
    ids: Sequence[str], reports: Mapping[str, EngineReport], facts: Mapping[str, WorkerFacts]
) -> str:
    """Why a group without current reports does not split."""
    silent = [name for name in ids if name not in reports or name not in facts]
    if silent:
        return f"there is no recent report from {', '.join(silent)}"
    return "its members report another epoch"


def _member_uses(
    ids: Sequence[str], reports: Mapping[str, EngineReport], facts: Mapping[str, WorkerFacts]
) -> tuple[MemberUse, ...]:
    """Capacity and usage of each member; the first member leads."""
    # Only the leader distinguishes blocks of batch work, and its count covers all stages. If batch
    # work is preemptible (`batch_yields`), use the leader's count for every member: members report
    # at different times, and batch KV that was allocated or freed in between would look like KV of
    # online requests.
    leader = ids[0]
    counts = [reports[leader if reports[leader].load.batch_yields else own] for own in ids]
    return tuple(
        MemberUse(
            worker_id,
            reports[worker_id].load.kv_blocks_total * facts[worker_id].block_size,
            used_tokens(counted, facts[worker_id]),
            facts[worker_id].kv_blocks_total * facts[worker_id].block_size,
        )
        for worker_id, counted in zip(ids, counts, strict=True)
    )
