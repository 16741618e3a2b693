"""Validates requested changes of groups, and builds the group records that a commit writes.

Used by the group protocol (`GroupState`). The *targets* of a change are its new groups, each a
tuple of stages (workers with their layers); its *sources* are the present groups of these workers.
A *tombstone* is the record of a dissolved group.
"""

from collections.abc import Iterable, Sequence

from services.core.groups.layer_map import Stage
from services.core.groups.records import Records, covers
from services.core.groups.vocabulary import (
    ChangeRefused,
    Group,
    GroupPhase,
    Member,
    Targets,
    Worker,
)
from services.core.ids import group_id_of

WORKERS_MAX = 40
"""Maximum number of workers in a change: etcd allows 128 operations in a transaction, and a commit
compares 3 records per worker."""


def refusal(
    records: Records, targets: Targets, may_be_degraded: bool = False
) -> ChangeRefused | None:
    """Why `targets` is invalid now, or None; `may_be_degraded` allows DEGRADED source groups."""
    stages = [stage for target in targets for stage in target]
    names = [stage.worker_id for stage in stages]
    if not targets or not all(targets):
        return ChangeRefused("a group needs a member; name at least one worker for each")
    if len(names) != len(set(names)):
        return ChangeRefused("a worker is named twice; it can be in one group only")
    if len(names) > WORKERS_MAX:
        return ChangeRefused(
            f"{len(names)} workers exceed the limit of {WORKERS_MAX}; change fewer groups at a time"
        )
    # The checks below need a record and a group of every worker.
    for name in names:
        if name not in records.workers:
            return ChangeRefused(f"{name} is not registered; start it, or leave it out")
        if records.group_of(name) is None:
            return ChangeRefused(f"{name} is in no group yet; try again in a moment")
    return (
        _source_refusal(records, names, may_be_degraded)
        or _model_refusal([records.workers[name] for name in names])
        or _capability_refusal(records, targets)
        or _layer_refusal(records, targets)
    )


def sources_of(records: Records, targets: Targets) -> tuple[str, ...]:
    """Ids of the current groups of the workers in `targets`, sorted."""
    group_ids = {records.group_of(stage.worker_id) for target in targets for stage in target}
    return tuple(sorted(group_id for group_id in group_ids if group_id is not None))


def target_groups(records: Records, targets: Targets, traceparent: str = "") -> tuple[Group, ...]:
    """The group records that a commit of `targets` writes: new groups, and tombstones.

    All have the same epoch, higher than that of every source and of every earlier group with a
    target's id. `traceparent` is written into the new groups.
    """
    sources = sources_of(records, targets)
    group_ids = [group_id_of(target[0].worker_id) for target in targets]
    workers = [stage.worker_id for target in targets for stage in target]
    epoch = records.next_epoch([*sources, *group_ids], workers)
    model = records.workers[workers[0]].model
    groups = [
        Group(
            group_id,
            epoch,
            GroupPhase.STABLE,
            tuple(_member(records.workers[stage.worker_id], stage) for stage in target),
            model,
            traceparent=traceparent,
        )
        for group_id, target in zip(group_ids, targets, strict=True)
    ]
    # Tombstones record the epoch: a later group with this id must have a higher epoch.
    gone = [group_id for group_id in sources if group_id not in group_ids]
    groups += [Group(group_id, epoch, GroupPhase.DISSOLVED, (), model) for group_id in gone]
    return tuple(groups)


def split_up(group: Group, num_layers: int) -> Targets:
    """Targets of a split: a singleton group with all layers for each member."""
    return tuple((Stage(member.worker_id, 0, num_layers),) for member in group.members)


def _member(worker: Worker, stage: Stage) -> Member:
    return Member(worker.worker_id, worker.incarnation, stage.first_layer, stage.end_layer)


def _source_refusal(
    records: Records, names: Iterable[str], may_be_degraded: bool
) -> ChangeRefused | None:
    named = set(names)
    for group_id in sorted({records.group_of(name) or "" for name in named}):
        group = records.groups[group_id].group
        if group.attempt:
            return ChangeRefused(
                f"{group_id} is being changed already; wait for that change to end"
            )
        if group.phase is not GroupPhase.STABLE and not may_be_degraded:
            return ChangeRefused(
                f"{group_id} is {group.phase}; wait until it has restored its layers"
            )
        missing = sorted({member.worker_id for member in group.members} - named)
        if missing:
            return ChangeRefused(
                f"{', '.join(missing)} of {group_id} is missing from the change; name it, too"
            )
    return None


def _model_refusal(workers: Sequence[Worker]) -> ChangeRefused | None:
    first = workers[0]
    for worker in workers:
        if (worker.model, worker.num_layers) != (first.model, first.num_layers):
            return ChangeRefused(
                f"{worker.worker_id} serves {worker.model} and {first.worker_id} {first.model}; "
                "only workers of the same model can be in a group"
            )
        if worker.model_digest != first.model_digest:
            return ChangeRefused(
                f"{worker.worker_id} and {first.worker_id} have loaded different weights, or"
                f" another config.json, as {first.model}, or compute in different ways; give both"
                " the same model folder, number of compute threads, and CPU vector width"
            )
        if worker.build != first.build:
            return ChangeRefused(
                f"{worker.worker_id} and {first.worker_id} run different versions; they can be in"
                " a group once the update is over"
            )
        if worker.settings != first.settings:
            return ChangeRefused(
                f"{worker.worker_id} runs with {worker.settings} and {first.worker_id} with"
                f" {first.settings}; give both the same settings"
            )
    return None


def _capability_refusal(records: Records, targets: Targets) -> ChangeRefused | None:
    for target in targets:
        for stage in target:
            worker = records.workers[stage.worker_id]
            if stage.num_layers < worker.num_layers and not worker.can_drop:
                return ChangeRefused(f"{worker.worker_id} cannot drop layers; leave it out")
    return None


def _layer_refusal(records: Records, targets: Targets) -> ChangeRefused | None:
    num_layers = records.workers[targets[0][0].worker_id].num_layers
    for target in targets:
        members = [_member(records.workers[stage.worker_id], stage) for stage in target]
        empty = any(stage.num_layers < 1 for stage in target)
        if empty or not covers(members, num_layers):
            names = ", ".join(member.worker_id for member in members)
            return ChangeRefused(
                f"the stages of {names} must cover layers 0 to {num_layers - 1}, each once, at"
                " least 1 per member"
            )
    present = {(g.group.members, g.group.phase) for g in records.groups.values()}
    wanted = {
        tuple(_member(records.workers[stage.worker_id], stage) for stage in target)
        for target in targets
    }
    if all((members, GroupPhase.STABLE) in present for members in wanted):
        return ChangeRefused("the groups already have these members and layers")
    return None
