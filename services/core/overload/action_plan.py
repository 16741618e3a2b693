"""Plans the merges or splits of groups that execute a decision of the overload monitor.

A *merge* drops duplicate parameters and so gains memory for KV; a *split* restores all layers at
each worker. KV is counted in tokens.
"""

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from services.core.groups.layer_map import ModelShape, SplitError
from services.core.groups.reconfiguration import WORKERS_MAX, split_up
from services.core.groups.vocabulary import Group, Targets
from services.core.overload.drop_plan import MergeKey, PlanGroup, plan_drop
from services.core.overload.group_use import used_tokens
from services.core.overload.partial_split import partial_targets
from services.core.overload.static_pipelines import MEMBERS
from services.core.overload.target import (
    Target,
    plan_group,
    plan_members,
    shared_location,
    targets_of,
)
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport

AS_MANY_AS_FIT = sys.maxsize
"""KV capacity in tokens that a merge aims at if memory has priority over speed."""


class NoPlan(Exception):
    """No change is possible now; the message is a sentence that explains why."""


@dataclass(frozen=True, slots=True)
class Change:
    """A planned change of the groups `group_ids` into `targets`; `text` describes it for people.

    `gain_tokens`: additional KV capacity.
    """

    group_ids: tuple[str, ...]
    targets: Targets
    text: str
    gain_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ActionPlan:
    """The changes that execute a decision; without changes, `reason` explains why.

    `short_tokens`: KV capacity still missing after all possible merges; None if the decision did
    not concern all groups of the model.
    """

    changes: tuple[Change, ...]
    short_tokens: int | None = None
    reason: str = ""


def merges(
    groups: Sequence[Group],
    facts: Mapping[str, WorkerFacts],
    reports: Mapping[str, EngineReport],
    needed_tokens: int,
) -> list[Change]:
    """Merges of groups of a model that gain `needed_tokens` of KV, or as many as possible.

    If they gain less, the first merge's text says so.

    Raises:
        NoPlan: if no merge gains memory.
    """
    known = [group for group in groups if not unmergeable(group, facts)]
    if len(known) < 2:
        raise NoPlan(
            "a merge needs two groups of steady workers that can drop layers and have no change"
            f" in progress; {len(known)} could merge now"
        )
    changes, gained = list[Change](), 0
    refused = f"no merge of {len(known)} groups gains memory"
    # Groups with different weights cannot merge. The largest set offers the most merges. A decision
    # to merge is always followed by a merge if any is possible, even if `needed_tokens` is 0.
    for alike in _by_digest(known, facts):
        if needed_tokens <= gained and changes:
            break
        try:
            more = _merges_alike(alike, facts, reports, needed_tokens - gained)
        except SplitError as error:
            refused = str(error)
            continue
        changes += more
        gained += sum(change.gain_tokens for change in more)
    if not changes:
        raise NoPlan(refused)
    if gained < needed_tokens:
        text = f"{changes[0].text}; all possible merges gain {gained} of {needed_tokens} tokens"
        changes[0] = replace(changes[0], text=text)
    return changes


def _by_digest(groups: Sequence[Group], facts: Mapping[str, WorkerFacts]) -> list[list[Group]]:
    """Groups by weights, largest set first; only groups with the same weights can merge."""
    by_digest: dict[str, list[Group]] = {}
    for group in groups:
        by_digest.setdefault(facts[group.members[0].worker_id].model_digest, []).append(group)
    return sorted(by_digest.values(), key=len, reverse=True)


def _merges_alike(
    known: Sequence[Group],
    facts: Mapping[str, WorkerFacts],
    reports: Mapping[str, EngineReport],
    needed_tokens: int,
    members_max: int = WORKERS_MAX,
) -> list[Change]:
    """Merges of groups with the same weights: drop plan, then layer maps. Raises SplitError."""
    shape = facts[known[0].members[0].worker_id].shape
    assert shape is not None  # unmergeable
    ids = [member.worker_id for group in known for member in group.members]
    arena_bytes = {worker_id: facts[worker_id].arena_bytes for worker_id in ids}
    shapes = {known[0].model: shape}
    planned = [_plan_group(group, shape, facts, reports) for group in known]
    needed_bytes = needed_tokens * shape.num_layers * shape.kv_bytes
    plan = plan_drop(planned, shapes, needed_bytes, members_max)
    targets = targets_of(plan, shapes, arena_bytes)
    # With unequal memory, a merge may lose capacity: the smallest stage limits the group.
    return [_merge(target) for target in targets if target.tokens_after > target.tokens_before]


def static_pipelines(
    groups: Sequence[Group], facts: Mapping[str, WorkerFacts], reports: Mapping[str, EngineReport]
) -> list[Change]:
    """Merges of single workers in pairs, as many as possible, for the policy static-pipeline.

    Raises:
        NoPlan: if no two of them can merge.
    """
    known = [group for group in groups if not unmergeable(group, facts)]
    changes: list[Change] = []
    for alike in _by_digest(known, facts):
        with suppress(SplitError):
            changes += _merges_alike(alike, facts, reports, AS_MANY_AS_FIT, members_max=MEMBERS)
    if not changes:
        raise NoPlan(f"no two of {len(known)} single workers that can drop layers can merge")
    return changes


def merges_of_full(
    groups: Sequence[Group],
    full_ids: Container[str],
    facts: Mapping[str, WorkerFacts],
    reports: Mapping[str, EngineReport],
) -> list[Change]:
    """Merges of each full group with a group with free memory: the smallest, nearest, least used.

    Raises:
        NoPlan: if no merge gains memory.
    """
    planned = {}
    for group in groups:
        if not unmergeable(group, facts):
            shape = facts[group.members[0].worker_id].shape
            assert shape is not None  # unmergeable
            planned[group.group_id] = group, _plan_group(group, shape, facts, reports)
    # As in a drop plan, small groups merge first: short pipelines slow serving least.
    by_size = sorted(planned.values(), key=lambda entry: len(entry[0].members))
    spare = [entry for entry in by_size if entry[0].group_id not in full_ids]
    changes: list[Change] = []
    for full, plan in [entry for entry in by_size if entry[0].group_id in full_ids]:
        alike = [entry for entry in spare if entry[1].key == plan.key]
        if not alike:
            continue
        # Groups that are close exchange KV over fast links; a group with little KV has the most
        # free memory.
        partner = min(alike, key=partial(_partner_order, plan))
        with suppress(SplitError):
            merged = _merges_alike([full, partner[0]], facts, reports, 1)
            if merged:
                changes += merged
                spare.remove(partner)
    if not changes:
        raise NoPlan("no group with free memory can merge with the full groups")
    return changes


def _partner_order(full: PlanGroup, spare: tuple[Group, PlanGroup]) -> tuple[int, int, int]:
    """Sort key of a group that may merge with `full`: size, distance, KV in use."""
    plan = spare[1]
    nearness = len(shared_location([full.location, plan.location]))
    return len(plan.members), -nearness, plan.running_kv_bytes


def splits(
    groups: Iterable[Group], facts: Mapping[str, WorkerFacts], parts: Mapping[str, int]
) -> list[Change]:
    """Splits of the merged groups among `groups`.

    `parts`: number of new groups, by group; the other groups split into single workers.

    Raises:
        NoPlan: if none of `groups` is merged, or all partial splits are impossible.
    """
    changes: list[Change] = []
    reason = "a change of the groups is in progress, or has just failed"
    for group in groups:
        if len(group.members) < 2:
            continue
        try:
            changes.append(_split(group, facts, parts.get(group.group_id, len(group.members))))
        except SplitError as error:
            reason = f"{group.group_id} cannot split: {error}"
    if not changes:
        raise NoPlan(reason)
    return changes


def _split(group: Group, facts: Mapping[str, WorkerFacts], parts: int) -> Change:
    """The split of a group into `parts` groups. Raises SplitError."""
    if parts >= len(group.members):
        targets = split_up(group, group.members[-1].end_layer)
        text = str(len(targets))
    else:
        targets = partial_targets(group, facts, parts)
        text = "+".join(str(len(target)) for target in targets)
    return Change((group.group_id,), targets, f"{group.group_id} splits into {text}")


def unmergeable(group: Group, facts: Mapping[str, WorkerFacts]) -> str:
    """Why the workers of a group cannot merge; empty if they can."""
    for member in group.members:
        worker = facts.get(member.worker_id)
        if worker is None:
            return f"{member.worker_id} is not registered"
        if worker.draining:
            return f"{member.worker_id} is shutting down"
        if not worker.can_drop or worker.shape is None:
            return f"{member.worker_id} cannot drop layers"
    return "" if group.members else f"{group.group_id} has no workers"


def _plan_group(
    group: Group,
    shape: ModelShape,
    facts: Mapping[str, WorkerFacts],
    reports: Mapping[str, EngineReport],
) -> PlanGroup:
    known = [facts[member.worker_id] for member in group.members]
    token_bytes = shape.num_layers * shape.kv_bytes
    return plan_group(
        group.group_id,
        MergeKey(
            group.model,
            model_digest=known[0].model_digest,
            build=known[0].build,
            settings=known[0].settings,
        ),
        plan_members(group),
        [worker.location for worker in known],
        [used_tokens(reports.get(w.worker_id), w) * token_bytes for w in known],
    )


def _merge(target: Target) -> Change:
    names = " + ".join(f"{stage.worker_id}: {stage.num_layers}" for stage in target.stages)
    return Change(
        target.merge.group_ids,
        (target.stages,),
        f"{', '.join(target.merge.group_ids)} merge ({names} layers) for"
        f" {target.tokens_after} instead of {target.tokens_before} tokens",
        target.tokens_after - target.tokens_before,
    )
