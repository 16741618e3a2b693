"""Plans which groups merge or split to carry out a decision about memory."""

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from services.core.groups.layer_map import ModelShape, SplitError
from services.core.groups.reconfiguration import split_up
from services.core.groups.vocabulary import Group, Targets
from services.core.overload.drop_plan import MergeKey, PlanGroup, plan_drop
from services.core.overload.group_use import used_tokens
from services.core.overload.target import (
    Target,
    plan_group,
    plan_members,
    shared_location,
    targets_of,
)
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import EngineReport


class NoPlan(Exception):
    """Nothing can be changed now; one sentence says why."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change-over: `group_ids` become `targets`; `text` describes it for people.

    `gain_tokens`: how much more KV the targets hold.
    """

    group_ids: tuple[str, ...]
    targets: Targets
    text: str
    gain_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ActionPlan:
    """The changes that carry out a decision. Without any, `reason` is one sentence that says why.

    `short_tokens` of KV are still missing after all merges that are possible; None where the
    decision was not about all groups of the model.
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
    """Merges of groups of one model that gain `needed_tokens` of KV, or as many as can be.

    If they gain less, the first one's text says so.

    Raises:
        NoPlan: if there is none that gains anything.
    """
    known = [group for group in groups if _can_merge(group, facts)]
    if len(known) < 2:
        raise NoPlan(
            "a merge needs two groups of steady workers that can drop layers and are not being"
            f" changed; {len(known)} could merge now"
        )
    found, gained = list[Change](), 0
    refused = f"no merge of {len(known)} groups gains memory"
    for alike in _by_digest(known, facts):
        if needed_tokens <= gained and found:
            break
        try:
            more = _merges_alike(alike, facts, reports, needed_tokens - gained)
        except SplitError as error:
            refused = str(error)
            continue
        found += more
        gained += sum(change.gain_tokens for change in more)
    if not found:
        raise NoPlan(refused)
    if gained < needed_tokens:
        text = f"{found[0].text}; all that can merge gains {gained} of {needed_tokens} tokens"
        found[0] = replace(found[0], text=text)
    return found


def _by_digest(groups: Sequence[Group], facts: Mapping[str, WorkerFacts]) -> list[list[Group]]:
    """Groups that serve the same weights, the most first: only these share shapes, and merge."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(facts[group.members[0].worker_id].model_digest, []).append(group)
    return sorted(found.values(), key=len, reverse=True)


def _merges_alike(
    known: Sequence[Group],
    facts: Mapping[str, WorkerFacts],
    reports: Mapping[str, EngineReport],
    needed_tokens: int,
) -> list[Change]:
    """Merges of groups that serve the same weights. Raises SplitError."""
    shape = facts[known[0].members[0].worker_id].shape
    assert shape is not None  # _can_merge
    ids = [member.worker_id for group in known for member in group.members]
    arena_bytes = {one: facts[one].arena_bytes for one in ids}
    shapes = {known[0].model: shape}
    planned = [_plan_group(group, shape, facts, reports) for group in known]
    plan = plan_drop(planned, shapes, needed_tokens * shape.num_layers * shape.kv_bytes)
    targets = targets_of(plan, shapes, arena_bytes)
    return [_merge(target) for target in targets if target.tokens_after > target.tokens_before]


def merges_of_full(
    groups: Sequence[Group],
    full_ids: Container[str],
    facts: Mapping[str, WorkerFacts],
    reports: Mapping[str, EngineReport],
) -> list[Change]:
    """Merges of each full group with one that has room: near ones first, then the emptiest.

    Raises:
        NoPlan: if there is none that gains anything.
    """
    planned = {}
    for group in groups:
        if _can_merge(group, facts):
            shape = facts[group.members[0].worker_id].shape
            assert shape is not None  # _can_merge
            planned[group.group_id] = group, _plan_group(group, shape, facts, reports)
    roomy = [one for one in planned.values() if one[0].group_id not in full_ids]
    found: list[Change] = []
    for full, plan in [one for one in planned.values() if one[0].group_id in full_ids]:
        alike = [one for one in roomy if one[1].key == plan.key]
        if not alike:
            continue
        chosen = max(alike, key=lambda one: (_nearness(plan, one[1]), -one[1].running_kv_bytes))
        with suppress(SplitError):
            made = _merges_alike([full, chosen[0]], facts, reports, 1)
            if made:
                found += made
                roomy.remove(chosen)
    if not found:
        raise NoPlan("no group that has room can merge with those that are full")
    return found


def _nearness(one: PlanGroup, other: PlanGroup) -> int:
    """How many parts of their locations, from the widest on, are the same."""
    return len(shared_location([one.location, other.location]))


def splits(groups: Iterable[Group]) -> list[Change]:
    """Each of the groups, which have all layers, becomes groups of one.

    Raises:
        NoPlan: if there are none.
    """
    found = [
        Change(
            (group.group_id,),
            split_up(group, group.members[-1].end_layer),
            f"{group.group_id} splits into {len(group.members)}",
        )
        for group in groups
        if len(group.members) > 1
    ]
    if not found:
        raise NoPlan("the groups are being changed already, or a change of them has just failed")
    return found


def _can_merge(group: Group, facts: Mapping[str, WorkerFacts]) -> bool:
    known = [facts.get(member.worker_id) for member in group.members]
    return bool(known) and all(
        one is not None and one.can_drop and not one.draining and one.shape is not None
        for one in known
    )


def _plan_group(
    group: Group,
    shape: ModelShape,
    facts: Mapping[str, WorkerFacts],
    reports: Mapping[str, EngineReport],
) -> PlanGroup:
    known = [facts[one.worker_id] for one in group.members]
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
        [one.location for one in known],
        [used_tokens(reports.get(one.worker_id), one) * token_bytes for one in known],
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
