"""The drop plan (KunServe Figure 6, greedy): merges groups until enough parameters are dropped.

A merge of groups drops duplicate parameters and frees their bytes for KV. The *size* of a group is
its number of members. The two smallest groups always merge, because short pipelines slow serving
least. Among pairs of equal size, groups close in the network merge first, then groups with the
least running KV, which a merge must exchange. A *place* is a location in the network such as a rack
or host, and its *depth* is the number of its parts. Groups merge only if their *merge keys* are
equal:

    for each size, from the smallest, while bytes are missing:
        a group left over from a smaller size merges with the nearest group, then least KV
        for each merge key, and each depth of places, from hosts to the whole network:
            at each place of that depth, sort groups by KV, and merge every two neighbours;
            of an odd number, the last group, with the most KV, is passed to the next wider place
            (if fewer pairs are needed, the pairs with the least total KV merge)
        a group without any partner is left over

A merged group is larger than its parts, so each size is sorted once, and the plan takes O(N log N).
`test_drop_plan.py` compares the results with a plain implementation. To plan for 10,000 instances
within milliseconds, groups are integers here, their properties are lists indexed by them, and
several rounds of pairwise merges happen in a single step where the outcome is the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from heapq import heappop, heappush
from itertools import chain, repeat
from operator import add, attrgetter
from typing import NamedTuple, TypeVar

from services.core.groups.layer_map import ModelShape
from services.core.groups.reconfiguration import WORKERS_MAX

Location = tuple[str, ...]
"""A worker's location, widest part first, such as (zone, rack, host)."""


class MergeKey(NamedTuple):
    """Groups merge only if their merge keys are equal."""

    model: str
    role: str = "serve"
    tensor_parallel: int = 1
    model_digest: str = ""
    build: str = ""
    settings: str = ""


class PlanMember(NamedTuple):
    """A worker and its current layers, `first_layer` to `end_layer` - 1."""

    worker_id: str
    first_layer: int
    end_layer: int


class PlanGroup(NamedTuple):
    """A group that may merge; members in stage order. `running_kv_bytes`: its KV in use."""

    group_id: str
    key: MergeKey
    members: tuple[PlanMember, ...]
    location: Location = ()
    running_kv_bytes: int = 0


class Merge(NamedTuple):
    """Groups that merge into a single group."""

    groups: tuple[PlanGroup, ...]
    freed_bytes: int  # of duplicate parameters

    @property
    def key(self) -> MergeKey:
        """The common merge key."""
        return self.groups[0].key

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Ids of the groups, sorted."""
        return tuple(sorted(group.group_id for group in self.groups))

    @property
    def members(self) -> tuple[PlanMember, ...]:
        """All members in stage order; the first leads."""
        # Order by current layers, so that few parameters move. Among equal layers, members of the
        # group with the most KV come first, so that its leader keeps its sequences.
        groups = sorted(self.groups, key=_running_kv_bytes, reverse=True)
        return tuple(sorted(chain.from_iterable(map(_members, groups)), key=_middle))


@dataclass(frozen=True, slots=True)
class DropPlan:
    """The merges, and the bytes that they free.

    If not `sufficient`, all possible merges are planned but free fewer bytes than needed.
    """

    merges: tuple[Merge, ...]
    freed_bytes: int
    needed_bytes: int
    sufficient: bool


def plan_drop(
    groups: Iterable[PlanGroup],
    shapes: Mapping[str, ModelShape],
    needed_bytes: int,
    members_max: int = WORKERS_MAX,
) -> DropPlan:
    """Merge groups until `needed_bytes` of parameters are freed, or no merge is possible.

    `shapes` is by model. A group has at most `members_max` members, each with at least a layer.
    """
    greedy = _Greedy(tuple(groups), shapes, needed_bytes, members_max)
    greedy.run()
    return DropPlan(greedy.merges(), greedy.freed_bytes, needed_bytes, greedy.missing_bytes <= 0)


_Places = dict[Location, list[int]]
"""Groups of a size and key, by the narrowest place that all members of a group share."""

_Candidates = tuple[list[int], dict[Location, int]]
"""Groups to merge, ordered by place and KV, and the number of possible merges at each place."""

_key = attrgetter("key")
_location = attrgetter("location")
_members = attrgetter("members")
_running_kv_bytes = attrgetter("running_kv_bytes")


class _Greedy:
    """A run of the algorithm. A group is a number; merged groups get the next numbers."""

    def __init__(
        self,
        groups: tuple[PlanGroup, ...],
        shapes: Mapping[str, ModelShape],
        needed_bytes: int,
        members_max: int,
    ) -> None:
        self.missing_bytes = needed_bytes
        self.freed_bytes = 0
        self._shapes = shapes
        self._max_size = {
            model: min(shape.num_layers, members_max) for model, shape in shapes.items()
        }
        self._original_count = len(groups)  # higher numbers are merged groups
        # By group number: original groups in it, KV (a float: exact here, and faster to sort),
        # bytes that its merges freed.
        self._sources: list[tuple[PlanGroup, ...]] = list(zip(groups, strict=True))
        self._kv_bytes = list(map(float, map(_running_kv_bytes, groups)))
        self._freed_bytes = [0] * len(groups)
        self._used: list[int] = []  # groups that are part of a merged group
        self._by_size: dict[int, dict[MergeKey, _Places]] = {}  # groups that may still merge
        self._sizes: list[int] = []  # a heap of the keys of `_by_size`
        self._add_groups(groups)

    def run(self) -> None:
        """Merge while bytes are missing and a merge is possible."""
        left_over: dict[MergeKey, tuple[int, int]] = {}
        while self._sizes and self.missing_bytes > 0:
            size = heappop(self._sizes)
            by_key = self._by_size.pop(size)
            # The group left over from a smaller size is the smallest, so it merges first.
            for key, places in by_key.items():
                if key in left_over:
                    self._merge_left_over(key, *left_over.pop(key), size, places)
            most = self._most_at_once(size, by_key)
            for key, places in by_key.items():
                alone = self._merge_alike(key, size, most, places)
                if alone is not None:
                    left_over[key] = size, alone

    def merges(self) -> tuple[Merge, ...]:
        """The merged groups that no later merge has absorbed."""
        merged = range(self._original_count, len(self._sources))
        final = sorted(set(merged).difference(self._used))
        sources = map(self._sources.__getitem__, final)
        freed_bytes = map(self._freed_bytes.__getitem__, final)
        # Equivalent to `Merge(...)`, in a third of the time.
        return tuple(map(tuple.__new__, repeat(Merge), zip(sources, freed_bytes, strict=True)))

    def _add_groups(self, groups: tuple[PlanGroup, ...]) -> None:
        """Add the groups to `_by_size`, by size, key and place."""
        sizes = map(len, map(_members, groups))
        kinds = zip(sizes, map(_key, groups), map(_location, groups), strict=True)
        numbers: defaultdict[tuple[int, MergeKey, Location], list[int]] = defaultdict(list)
        for number, kind in enumerate(kinds):
            numbers[kind].append(number)
        for (size, key, location), here in numbers.items():
            self._places(key, size)[location] = here

    def _places(self, key: MergeKey, size: int) -> _Places:
        """The groups of a size and key by place, created if absent; callers add groups to it."""
        by_key = self._by_size.get(size)
        if by_key is None:
            by_key = self._by_size[size] = {}
            heappush(self._sizes, size)
        return by_key.setdefault(key, {})

    def _most_at_once(self, size: int, by_key: Mapping[MergeKey, _Places]) -> int:
        """Number of groups of this size, a power of 2, that may merge in a single step."""
        # A merge of more than 2 equals rounds of pairwise merges if all these rounds are needed
        # anyway and no group of an intermediate size takes part: groups are sorted by KV, so the
        # sums of neighbours are sorted as well, and the next round merges neighbours again.
        counts = [
            (sum(map(len, places.values())), self._shapes[key.model])
            for key, places in by_key.items()
        ]
        longest = max(self._max_size[key.model] for key in by_key)
        most = 2
        while not self._sizes and 2 * most * size <= longest:
            # Upper bound of the bytes that these rounds free: each group that a merge absorbs frees
            # at most all its parameters.
            freed_bytes = sum(
                (count - count // (2 * most)) * shape.parameter_bytes(size)
                for count, shape in counts
            )
            if freed_bytes > self.missing_bytes:
                break
            most *= 2
        return most

    def _merge_left_over(
        self, key: MergeKey, small_size: int, small: int, size: int, places: _Places
    ) -> None:
        """Merge a left-over group of a smaller size with the nearest group of `places`."""
        # If this merge exceeds the member limit, so does a merge with any larger group.
        shape = self._shapes[key.model]
        if self.missing_bytes <= 0 or small_size + size > self._max_size[key.model]:
            return
        location = reduce(_common, map(_location, self._sources[small]))
        shared = {place: len(_common(location, place)) for place, here in places.items() if here}
        depth = max(shared.values())
        _, near, place = min(
            (self._kv_bytes[number], number, place)
            for place in shared
            if shared[place] == depth
            for number in places[place]
        )
        places[place].remove(near)
        merges_at = {location[:depth]: 1}
        freed_bytes = shape.freed_bytes(small_size, size)
        self._merge(key, small_size + size, freed_bytes, [[small], [near]], merges_at)

    def _merge_alike(self, key: MergeKey, size: int, most: int, places: _Places) -> int | None:
        """Merge groups of equal size, nearest first; returns the group left without a partner."""
        shape = self._shapes[key.model]
        while most * size > self._max_size[key.model]:
            most //= 2
        if most < 2:
            return None
        # From hosts to the whole network: KV exchange and activations prefer short paths.
        for depth in range(max(map(len, places)), -1, -1):
            candidates, places = self._neighbours(depth, most, places)
            for at_once, (numbers, merges_at) in candidates.items():
                columns = [numbers[column::at_once] for column in range(at_once)]
                freed_bytes = at_once * shape.parameter_bytes(size)
                freed_bytes -= shape.parameter_bytes(at_once * size)
                self._merge(key, at_once * size, freed_bytes, columns, merges_at)
            if self.missing_bytes <= 0:
                return None
        return next((here[0] for here in places.values()), None)

    def _neighbours(
        self, depth: int, most: int, places: _Places
    ) -> tuple[dict[int, _Candidates], _Places]:
        """Groups that may merge at places of this depth, by number at once: `most`, `most` / 2, …

        Also returns the places for the next depth, with the groups that are left over.
        """
        kv_bytes_of = self._kv_bytes.__getitem__
        candidates: dict[int, _Candidates] = {}
        while most > 1:
            candidates[most] = [], {}
            most //= 2
        wider: defaultdict[Location, list[int]] = defaultdict(list)
        for place, here in places.items():
            if len(place) < depth:
                wider[place] += here
                continue
            # Sort by KV, so that the group left over has the most. If all groups of the place merge
            # into a single group, the order does not matter.
            if len(here) not in candidates:
                here.sort(key=kv_bytes_of)
            left = len(here)
            for at_once, (numbers, merges_at) in candidates.items():
                if at_once <= left:
                    count, rest = divmod(left, at_once)
                    merges_at[place] = count
                    numbers.extend(here[len(here) - left : len(here) - rest])
                    left = rest
            if left:
                wider[place[:-1]] += here[-left:]
        return candidates, wider

    def _merge(
        self,
        key: MergeKey,
        size: int,
        each_bytes: int,
        columns: list[list[int]],
        merges_at: Mapping[Location, int],
    ) -> None:
        """Apply as many of the possible merges as needed, with the least KV to exchange first.

        Merge number i consists of the i-th group of each column, has `size` members and frees
        `each_bytes`. `merges_at`: the number of possible merges at each place, in the same order.
        """
        kv_bytes = _sums(self._kv_bytes, columns)
        count = max(0, -(-self.missing_bytes // each_bytes))  # needed merges, rounded up
        if count < len(kv_bytes):
            least = sorted(range(len(kv_bytes)), key=kv_bytes.__getitem__)[:count]
            columns = [[column[index] for index in least] for column in columns]
        elif 0 < len(kv_bytes) < count:
            # More merges are needed than possible here, so the merged groups may merge again.
            places, number = self._places(key, size), len(self._sources)
            for place, here in merges_at.items():
                places.setdefault(place, []).extend(range(number, number + here))
                number += here
            self._kv_bytes += kv_bytes
        for column in columns:
            self._used += column
        self._sources += _sums(self._sources, columns)
        self._freed_bytes += map(each_bytes.__add__, _sums(self._freed_bytes, columns))
        merged = len(columns[0])
        self.freed_bytes += each_bytes * merged
        self.missing_bytes -= each_bytes * merged


_Value = TypeVar("_Value", float, int, tuple[PlanGroup, ...])


def _sums(values: list[_Value], columns: Sequence[Iterable[int]]) -> list[_Value]:
    """For each row of `columns`, the sum of the `values` at its indices."""
    first, *others = (map(values.__getitem__, column) for column in columns)
    return list(reduce(partial(map, add), others, first))


def _middle(member: PlanMember) -> int:
    """Sort key: twice the middle of the member's layers."""
    return member.first_layer + member.end_layer


def _common(left: Location, right: Location) -> Location:
    """The narrowest place that contains both locations."""
    count = 0
    for mine, other in zip(left, right, strict=False):
        if mine != other:
            break
        count += 1
    return left[:count]
