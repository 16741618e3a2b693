"""Changes requested by naming groups, and the division of layers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.core.groups.layer_map import ModelShape, Stage
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.overload.manual_change import InvalidChange, merge_of, split_of
from services.core.overload.worker_facts import WorkerFacts

LAYERS = 12
SHAPE = ModelShape(
    LAYERS, layer_bytes=1000, embedding_bytes=0, head_bytes=0, tied_embeddings=False, kv_bytes=5
)
ARENA_BYTES = LAYERS * 1000 + 100 * LAYERS * 5
FACTS = {
    f"w{n}": WorkerFacts(f"w{n}", "m", 16, 6, ARENA_BYTES, SHAPE, ("h",), can_drop=True)
    for n in range(3)
}


def group(*layers: tuple[str, int, int], model: str = "m") -> Group:
    members = tuple(Member(name, "i", first, end) for name, first, end in layers)
    return Group(f"group-{members[0].worker_id}", 1, GroupPhase.STABLE, members, model)


ALONE = [group((f"w{n}", 0, LAYERS)) for n in range(3)]


def counts(stages: Sequence[Stage]) -> list[tuple[str, int]]:
    return [(stage.worker_id, stage.num_layers) for stage in stages]


def test_groups_merge_in_the_order_in_which_they_are_named() -> None:
    change = merge_of(ALONE, ["group-w2", "group-w0"], FACTS)
    assert change.group_ids == ("group-w2", "group-w0")
    assert change.targets == ((Stage("w2", 0, 6), Stage("w0", 6, 12)),)
    assert "room for 400 tokens of KV instead of 200" in change.text
    (all_of_them,) = merge_of(ALONE, [], FACTS).targets
    assert counts(all_of_them) == [("w0", 4), ("w1", 4), ("w2", 4)]


def test_a_member_with_less_memory_runs_fewer_layers() -> None:
    facts = FACTS | {"w1": replace(FACTS["w1"], arena_bytes=ARENA_BYTES // 2)}
    (stages,) = merge_of(ALONE[:2], [], facts).targets
    assert counts(stages) == [("w0", 8), ("w1", 4)]


def test_a_leaving_worker_does_not_merge() -> None:
    facts = FACTS | {"w1": replace(FACTS["w1"], draining=True)}
    with pytest.raises(InvalidChange, match="w1 is leaving; name other groups"):
        merge_of(ALONE, [], facts)


def test_a_member_that_keeps_a_large_head_runs_fewer_layers() -> None:
    shape = replace(SHAPE, head_bytes=8000, head_cost=8.0)
    facts = {name: replace(fact, shape=shape, arena_bytes=30_000) for name, fact in FACTS.items()}
    (stages,) = merge_of(ALONE[:2], [], facts).targets
    assert counts(stages) == [("w0", 7), ("w1", 5)]


def test_a_merged_group_merges_again() -> None:
    merged = group(("w0", 0, 6), ("w1", 6, LAYERS))
    change = merge_of([merged, ALONE[2]], [], FACTS)
    assert counts(change.targets[0]) == [("w0", 4), ("w1", 4), ("w2", 4)]


@pytest.mark.parametrize(
    ("groups", "names", "message"),
    [
        (ALONE, ["group-w0", "group-w0"], "named twice"),
        (
            ALONE,
            ["group-w9"],
            "no group 'group-w9' is serving; the groups are: group-w0, group-w1",
        ),
        (ALONE[:1], [], "a merge needs two"),
        ([ALONE[0], group(("w1", 0, LAYERS), model="n")], [], "different models"),
    ],
)
def test_an_impossible_merge_is_a_short_error(
    groups: Sequence[Group], names: Sequence[str], message: str
) -> None:
    with pytest.raises(InvalidChange, match=message):
        merge_of(groups, names, FACTS)


def test_workers_that_cannot_merge_are_named() -> None:
    fixed = FACTS | {"w1": replace(FACTS["w1"], can_drop=False)}
    with pytest.raises(InvalidChange, match="w1 cannot drop layers: a transport or an engine"):
        merge_of(ALONE, [], fixed)
    silent = {name: replace(fact, shape=None) for name, fact in FACTS.items()}
    with pytest.raises(InvalidChange, match="reports the sizes"):
        merge_of(ALONE, [], silent)
    small = replace(SHAPE, num_layers=2)
    few = {name: replace(fact, shape=small) for name, fact in FACTS.items()}
    with pytest.raises(InvalidChange, match="3 members cannot share 2 layers"):
        merge_of(ALONE, [], few)


def test_a_group_splits_into_its_members() -> None:
    merged = group(("w0", 0, 5), ("w1", 5, LAYERS))
    for name in (None, "group-w0"):
        change = split_of([merged, ALONE[2]], name, FACTS)
        assert change.targets == ((Stage("w0", 0, LAYERS),), (Stage("w1", 0, LAYERS),))
        assert change.text == "group-w0 splits into 2"


def test_an_impossible_split_is_a_short_error() -> None:
    merged = [group(("w0", 0, 5), ("w1", 5, LAYERS)), group(("w2", 0, 5), ("w3", 5, LAYERS))]
    with pytest.raises(
        InvalidChange, match="several merged groups; name one of group-w0, group-w2"
    ):
        split_of(merged, None, FACTS)
    with pytest.raises(InvalidChange, match="no groups are merged"):
        split_of(ALONE, None, FACTS)
    with pytest.raises(InvalidChange, match="group-w0 has one member"):
        split_of(ALONE, "group-w0", FACTS)
    with pytest.raises(InvalidChange, match="no group 'x' is serving"):
        split_of(ALONE, "x", FACTS)
