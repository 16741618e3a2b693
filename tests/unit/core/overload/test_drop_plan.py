"""The plan frees enough or reports a shortfall, and equals that of the reference algorithm."""

from heapq import heapify, heappop, heappush
from random import Random

import pytest

from services.core.groups.layer_map import MemberMemory, ModelShape, split_layers
from services.core.overload.drop_plan import (
    DropPlan,
    MergeKey,
    PlanGroup,
    PlanMember,
    plan_drop,
)

SHAPES = {
    "a": ModelShape(12, 10, 7, 3, True, 1),
    "b": ModelShape(4, 25, 9, 3, False, 1),
}
KEYS = [MergeKey("a"), MergeKey("a", tensor_parallel=2), MergeKey("b")]
PAIR_BYTES = SHAPES["a"].freed_bytes(1, 1)


def group(name: str, key: MergeKey, size: int = 1, place: str = "", kv: int = 0) -> PlanGroup:
    layers = SHAPES[key.model].num_layers
    edges = [layers * index // size for index in range(size + 1)]
    members = tuple(
        PlanMember(f"{name}.{index}", *edges[index : index + 2]) for index in range(size)
    )
    return PlanGroup(name, key, members, tuple(place), kv)


def random_groups(rng: Random) -> list[PlanGroup]:
    groups = []
    for number in range(rng.randrange(0, 40)):
        key = rng.choice(KEYS)
        size = min(SHAPES[key.model].num_layers, rng.choice([1, 1, 1, 2, 3, 5]))
        place = rng.choice(["", "x", "xp", "xp1", "xp2", "xq1", "yq1"])
        groups.append(group(f"g{number}", key, size, place, rng.randrange(5)))
    return groups


def most_freed(groups: list[PlanGroup], key: MergeKey) -> list[int]:
    """What Figure 6 has freed after each merge of groups of one key: sizes are all that counts."""
    shape = SHAPES[key.model]
    sizes = [len(group.members) for group in groups if group.key == key]
    heapify(sizes)
    freed = [0]
    while len(sizes) > 1:
        left, right = heappop(sizes), heappop(sizes)
        if left + right > shape.num_layers:
            break
        freed.append(freed[-1] + shape.freed_bytes(left, right))
        heappush(sizes, left + right)
    return freed


class Plainly:
    """The reference algorithm of the module's docstring, pair by pair, on lists of groups."""

    def __init__(self, groups: list[PlanGroup], needed_bytes: int) -> None:
        self.missing_bytes = needed_bytes
        self.standing: list[tuple[PlanGroup, ...]] = [(group,) for group in groups]

    def run(self) -> set[frozenset[str]]:
        """The ids of the groups in each merge."""
        left_over: dict[MergeKey, tuple[PlanGroup, ...]] = {}
        done = 0
        while self.missing_bytes > 0:
            sizes = {size_of(group) for group in self.standing if size_of(group) > done}
            if not sizes:
                break
            done = min(sizes)
            by_key: dict[MergeKey, list[tuple[PlanGroup, ...]]] = {}
            for small in self.standing:
                if size_of(small) == done:
                    by_key.setdefault(small[0].key, []).append(small)
            for key in [key for key in by_key if key in left_over]:
                self.merge_nearest(left_over.pop(key), by_key[key])
            for key, alike in by_key.items():
                odd = self.merge_pairs(alike)
                if odd is not None:
                    left_over[key] = odd
        return {frozenset(g.group_id for g in group) for group in self.standing if len(group) > 1}

    def merge_nearest(
        self, small: tuple[PlanGroup, ...], alike: list[tuple[PlanGroup, ...]]
    ) -> None:
        if self.missing_bytes > 0 and self.fits(small, alike[0]):
            near = max(len(common(small, group)) for group in alike)
            nearest = [group for group in alike if len(common(small, group)) == near]
            self.merge(small, chosen := min(nearest, key=kv_of))
            alike.remove(chosen)

    def merge_pairs(self, alike: list[tuple[PlanGroup, ...]]) -> tuple[PlanGroup, ...] | None:
        """Merge near groups first; returns the group without a partner."""
        if not alike or not self.fits(alike[0], alike[0]):
            return None
        places: dict[tuple[str, ...], list[tuple[PlanGroup, ...]]] = {}
        for group in alike:
            places.setdefault(common(group, group), []).append(group)
        for depth in range(max(map(len, places)), -1, -1):
            pairs = []
            for place in [place for place in places if len(place) == depth]:
                here = sorted(places.pop(place), key=kv_of)
                pairs += list(zip(here[::2], here[1::2], strict=False))
                if len(here) % 2:
                    places.setdefault(place[:-1], []).append(here[-1])
            for pair in sorted(pairs, key=lambda pair: kv_of(pair[0]) + kv_of(pair[1])):
                if self.missing_bytes > 0:
                    self.merge(*pair)
        return next((here[0] for here in places.values()), None)

    def fits(self, first: tuple[PlanGroup, ...], second: tuple[PlanGroup, ...]) -> bool:
        return size_of(first) + size_of(second) <= SHAPES[first[0].key.model].num_layers

    def merge(self, first: tuple[PlanGroup, ...], second: tuple[PlanGroup, ...]) -> None:
        shape = SHAPES[first[0].key.model]
        self.missing_bytes -= shape.freed_bytes(size_of(first), size_of(second))
        self.standing = [each for each in self.standing if each not in (first, second)]
        self.standing.append(first + second)


def size_of(groups: tuple[PlanGroup, ...]) -> int:
    return sum(len(group.members) for group in groups)


def kv_of(groups: tuple[PlanGroup, ...]) -> int:
    return sum(group.running_kv_bytes for group in groups)


def common(first: tuple[PlanGroup, ...], second: tuple[PlanGroup, ...]) -> tuple[str, ...]:
    """The narrowest location that contains both."""
    prefix = first[0].location
    for group_ in first + second:
        while group_.location[: len(prefix)] != prefix:
            prefix = prefix[:-1]
    return prefix


def test_the_fast_plan_equals_the_reference_plan() -> None:
    """With different KV everywhere the plan is unique."""
    rng = Random(5)
    shares = set()
    for _ in range(1500):
        groups = random_groups(rng)
        kv = rng.sample(range(1, 1 << 40), len(groups))
        groups = [group._replace(running_kv_bytes=kv.pop()) for group in groups]
        needed = rng.choice([1, 50, 200, 1000, 10**6])
        merges = plan_drop(groups, SHAPES, needed, members_max=100).merges
        wanted = Plainly(groups, needed).run()
        assert {frozenset(merge.group_ids) for merge in merges} == wanted
        shares.add(min(len(wanted), 8))
    assert shares == set(range(9))


def check(plan: DropPlan, groups: list[PlanGroup], needed: int) -> None:
    by_id = {group.group_id: group for group in groups}
    merged = [group_id for merge in plan.merges for group_id in merge.group_ids]
    assert len(merged) == len(set(merged))
    for merge in plan.merges:
        shape = SHAPES[merge.key.model]
        sources = [by_id[group_id] for group_id in merge.group_ids]
        assert len(sources) > 1 and all(source.key == merge.key for source in sources)
        members = [member for source in sources for member in source.members]
        assert sorted(merge.members) == sorted(members)
        held = sum(shape.parameter_bytes(len(source.members)) for source in sources)
        assert merge.freed_bytes == held - shape.parameter_bytes(len(members))
        stages = split_layers(
            shape, [MemberMemory(m.worker_id, 10**6) for m in merge.members], 10**9
        )
        covered = [layer for stage in stages for layer in range(stage.first_layer, stage.end_layer)]
        assert covered == list(range(shape.num_layers))
    assert plan.freed_bytes == sum(merge.freed_bytes for merge in plan.merges)
    assert plan.sufficient == (plan.freed_bytes >= needed)


def test_a_plan_frees_enough_or_reports_a_shortfall() -> None:
    rng = Random(2)
    outcomes = set()
    for _ in range(1500):
        groups, needed = random_groups(rng), rng.choice([0, 1, 200, 1000, 10**6])
        plan = plan_drop(groups, SHAPES, needed)
        check(plan, groups, needed)
        most = sum(most_freed(groups, key)[-1] for key in KEYS)
        assert plan.sufficient == (most >= needed)
        if not plan.sufficient:
            assert plan.freed_bytes == most
        outcomes.add((plan.sufficient, bool(plan.merges)))
    assert len(outcomes) == 4


def test_a_plan_merges_no_more_than_figure_6() -> None:
    rng = Random(3)
    for _ in range(500):
        groups = [group for group in random_groups(rng) if group.key == KEYS[0]]
        steps = most_freed(groups, KEYS[0])
        needed = rng.randrange(1, steps[-1] + 2)
        plan = plan_drop(groups, SHAPES, needed)
        expected = next((freed for freed in steps if freed >= needed), steps[-1])
        assert plan.freed_bytes == expected


def test_small_groups_merge_first() -> None:
    groups = [group("g0", KEYS[0], 2), group("g1", KEYS[0]), group("g2", KEYS[0], 2)]
    groups.append(group("g3", KEYS[0]))
    (merge,) = plan_drop(groups, SHAPES, 1).merges
    assert merge.group_ids == ("g1", "g3")


def test_distance_precedes_kv_use() -> None:
    groups = [
        group("g0", KEYS[0], place="xp1", kv=9),
        group("g1", KEYS[0], place="xp2", kv=0),
        group("g2", KEYS[0], place="xp1", kv=8),
        group("g3", KEYS[0], place="yq1", kv=0),
        group("g4", KEYS[0], place="xp2", kv=7),
    ]
    planned = [plan_drop(groups, SHAPES, count * PAIR_BYTES).merges for count in (1, 2)]
    assert [sorted(merge.group_ids for merge in merges) for merges in planned] == [
        [("g1", "g4")],
        [("g0", "g2"), ("g1", "g4")],
    ]
    # The third merge is of the odd one, far away, with the pair that has least to move.
    (odd,) = (m for m in plan_drop(groups, SHAPES, 10**6).merges if "g3" in m.group_ids)
    assert len(odd.members) == 5


def test_an_odd_group_joins_the_nearest() -> None:
    groups = [
        group("g0", KEYS[0], place="xp1"),
        group("g1", KEYS[0], 2, place="yq1"),
        group("g2", KEYS[0], 2, place="xp2", kv=9),
    ]
    (merge,) = plan_drop(groups, SHAPES, 1).merges
    assert merge.group_ids == ("g0", "g2")


def test_ties_in_distance_go_to_the_group_with_least_kv() -> None:
    groups = [
        group("g0", KEYS[0], place="xp1"),
        group("g1", KEYS[0], 2, place="xp2", kv=5),
        group("g2", KEYS[0], 2, place="xp3", kv=3),
        group("g3", KEYS[0], 2, place="xp2", kv=4),
    ]
    (merge,) = plan_drop(groups, SHAPES, 1).merges
    assert merge.group_ids == ("g0", "g2")


def test_the_leader_has_most_kv() -> None:
    (merge,) = plan_drop([group("g0", KEYS[0]), group("g1", KEYS[0], kv=5)], SHAPES, 1).merges
    assert [member.worker_id for member in merge.members] == ["g1.0", "g0.0"]


def test_members_are_ordered_by_their_layers() -> None:
    """Then no parameter moves in 2+2, and only the middle one's in 2+1."""
    four = plan_drop([group("g0", KEYS[0], 2), group("g1", KEYS[0], 2, kv=1)], SHAPES, 1)
    assert [m.worker_id for m in four.merges[0].members] == ["g1.0", "g0.0", "g1.1", "g0.1"]
    three = plan_drop([group("g0", KEYS[0], 2), group("g1", KEYS[0])], SHAPES, 1)
    assert [m.worker_id for m in three.merges[0].members] == ["g0.0", "g1.0", "g0.1"]


def test_no_group_gets_longer_than_the_model() -> None:
    plan = plan_drop([group(f"g{number}", KEYS[2]) for number in range(7)], SHAPES, 10**9)
    assert sorted(len(merge.members) for merge in plan.merges) == [3, 4]


def test_no_group_gets_longer_than_a_change_may_be() -> None:
    groups = [group(f"g{index}", KEYS[0]) for index in range(6)]
    plan = plan_drop(groups, SHAPES, 1 << 60, members_max=3)
    assert not plan.sufficient
    assert [len(merge.members) for merge in plan.merges] == [2, 2, 2]


@pytest.mark.parametrize("needed", [0, -5])
def test_no_plan_is_needed_without_demand(needed: int) -> None:
    plan = plan_drop([group("g0", KEYS[0]), group("g1", KEYS[0])], SHAPES, needed)
    assert plan == DropPlan((), 0, needed, True)


@pytest.mark.parametrize("share", [0.1, 0.5, 2.0])
def test_planning_scales_to_10000_instances(share: float) -> None:
    """Realistic racks and hosts; `tideserve plan` reports how long planning takes."""
    rng = Random(1)
    groups = [
        group(f"g{number}", KEYS[0], kv=rng.randrange(1000))._replace(
            location=(f"rack-{number // 64}", f"host-{number // 8}")
        )
        for number in range(10_000)
    ]
    needed = int(share * 5_000 * PAIR_BYTES)
    plan = plan_drop(groups, SHAPES, needed)
    check(plan, groups, needed)
    if share <= 0.5:
        assert plan.sufficient
        assert all(len(merge.groups) == 2 for merge in plan.merges)
        assert all(len({group.location for group in merge.groups}) == 1 for merge in plan.merges)
