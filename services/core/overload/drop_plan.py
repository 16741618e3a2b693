"""Which groups merge so that enough parameters are dropped: KunServe Figure 6, greedy.

The two smallest groups merge, always: few members per pipeline slow serving least. Among pairs of
equal size, groups near in the network go first, then those with least running KV to exchange:

    for each size, from the smallest, while bytes are missing:
        a group that a smaller size has left over merges with the nearest, of these with least KV
        for each merge key, and each depth of locations, from hosts to the whole network:
            at each place of that depth, in the order of their KV, every two neighbours merge;
            of an odd number the last, which has most KV, goes on to the next wider place
            (if not all these pairs are needed, those with least KV in sum merge)
        a group that finds no partner at all is left over

A merged group is larger than both its parts, so each size is sorted once, and the plan takes
O(N log N). `test_drop_plan.py` has this algorithm as plain code, and compares. Ten thousand
instances are planned for in milliseconds: to that end groups are numbers here, their properties are
lists, and merges of pairs of pairs are made in one step where that is the same.
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
"""Where a worker is, from the widest to the narrowest, such as zone, rack, host."""


class MergeKey(NamedTuple):
    """Only groups that agree in all of it merge."""

    model: str
    role: str = "serve"
    tensor_parallel: int = 1
    model_digest: str = ""
    build: str = ""
    settings: str = ""


class PlanMember(NamedTuple):
    """A worker and the layers that it runs now, `first_layer` to `end_layer` - 1."""

    worker_id: str
    first_layer: int
    end_layer: int


class PlanGroup(NamedTuple):
    """A group that may merge; members in stage order. `running_kv_bytes` is what it would move."""

    group_id: str
    key: MergeKey
    members: tuple[PlanMember, ...]
    location: Location = ()
    running_kv_bytes: int = 0


class Merge(NamedTuple):
    """Groups that become one."""

    groups: tuple[PlanGroup, ...]
    freed_bytes: int

    @property
    def key(self) -> MergeKey:
        """What the groups agree in."""
        return self.groups[0].key

    @property
    def group_ids(self) -> tuple[str, ...]:
        """The groups, ordered by id."""
        return tuple(sorted(group.group_id for group in self.groups))

    @property
    def members(self) -> tuple[PlanMember, ...]:
        """All members in the order of their stages; the first leads.

        It is the order of the layers that they run now, so that few parameters must move. Of
        those that run the same layers, the members of the group with most KV come first: a
        leader's requests stay where they are.
        """
        groups = sorted(self.groups, key=_running_kv_bytes, reverse=True)
        return tuple(sorted(chain.from_iterable(map(_members, groups)), key=_middle))


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What merges, and whether that frees `needed_bytes`.

    Unless `sufficient`, everything that can merge does, and more instances are needed.
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
    """Merge until `needed_bytes` of parameters are freed, or nothing can merge any more.

    `shapes`: of each model. A group gets no more members than its model has layers, nor than
    `members_max`.
    """
    greedy = _Greedy(tuple(groups), shapes, needed_bytes, members_max)
    greedy.run()
    return DropPlan(greedy.merges(), greedy.freed_bytes, needed_bytes, greedy.missing_bytes <= 0)


_Places = dict[Location, list[int]]
"""Groups of one size and key, by number, at the places that all members of each share."""

_Candidates = tuple[list[int], dict[Location, int]]
"""Groups to merge, in order, and how many mergers there are at each place."""

_key = attrgetter("key")
_location = attrgetter("location")
_members = attrgetter("members")
_running_kv_bytes = attrgetter("running_kv_bytes")


class _Greedy:
    """One run of the algorithm. Groups have numbers, those that merges make the next ones."""

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
        self._longest = {
            model: min(shape.num_layers, members_max) for model, shape in shapes.items()
        }
        self._given = len(groups)
        # By group: what it was made of, its KV (exact as a float, and sooner sorted), what its
        # merges have freed.
        self._sources: list[tuple[PlanGroup, ...]] = list(zip(groups, strict=True))
        self._kv_bytes = list(map(float, map(_running_kv_bytes, groups)))
        self._freed_bytes = [0] * len(groups)
        self._used: list[int] = []  # what merges have used up
        self._by_size: dict[int, dict[MergeKey, _Places]] = {}
        self._sizes: list[int] = []  # a heap of the keys of `_by_size`
        self._sort_in(groups)

    def run(self) -> None:
        """Merge for as long as it is needed and possible."""
        left_over: dict[MergeKey, tuple[int, int]] = {}
        while self._sizes and self.missing_bytes > 0:
            size = heappop(self._sizes)
            by_key = self._by_size.pop(size)
            for key, places in by_key.items():
                if key in left_over:
                    self._merge_left_over(key, *left_over.pop(key), size, places)
            most = self._most_at_once(size, by_key)
            for key, places in by_key.items():
                alone = self._merge_alike(key, size, most, places)
                if alone is not None:
                    left_over[key] = size, alone

    def merges(self) -> tuple[Merge, ...]:
        """The groups that came about and still stand."""
        made = range(self._given, len(self._sources))
        standing = sorted(set(made).difference(self._used))
        sources = map(self._sources.__getitem__, standing)
        freed_bytes = map(self._freed_bytes.__getitem__, standing)
        # As `Merge(...)`, which takes three times as long.
        return tuple(map(tuple.__new__, repeat(Merge), zip(sources, freed_bytes, strict=True)))

    def _sort_in(self, groups: tuple[PlanGroup, ...]) -> None:
        """Put the groups where those of their size, key and place are."""
        sizes = map(len, map(_members, groups))
        kinds = zip(sizes, map(_key, groups), map(_location, groups), strict=True)
        numbers: defaultdict[tuple[int, MergeKey, Location], list[int]] = defaultdict(list)
        for number, kind in enumerate(kinds):
            numbers[kind].append(number)
        for (size, key, location), here in numbers.items():
            self._places(key, size)[location] = here

    def _places(self, key: MergeKey, size: int) -> _Places:
        """The groups of that size and key, to add to."""
        by_key = self._by_size.get(size)
        if by_key is None:
            by_key = self._by_size[size] = {}
            heappush(self._sizes, size)
        return by_key.setdefault(key, {})

    def _most_at_once(self, size: int, by_key: Mapping[MergeKey, _Places]) -> int:
        """How many groups of this size, a power of two, may become one in a single step.

        More than two if all the merges of pairs that lead there are needed in any case, and no
        groups of the sizes between take part: in the order of KV, the sums of pairs are in order,
        so that always neighbours merge.
        """
        counts = [
            (sum(map(len, places.values())), self._shapes[key.model])
            for key, places in by_key.items()
        ]
        longest = max(self._longest[key.model] for key in by_key)
        most = 2
        while not self._sizes and 2 * most * size <= longest:
            # A group frees no more than it holds.
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
        """Merge the group that smaller sizes left over with the nearest of `places`."""
        # If it would be too long, it would be with any larger group, too.
        shape = self._shapes[key.model]
        if self.missing_bytes <= 0 or small_size + size > self._longest[key.model]:
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
        found = {location[:depth]: 1}
        freed_bytes = shape.freed_bytes(small_size, size)
        self._merge(key, small_size + size, freed_bytes, [[small], [near]], found)

    def _merge_alike(self, key: MergeKey, size: int, most: int, places: _Places) -> int | None:
        """Merge groups of one size, near ones first; returns the one that found no partner."""
        shape = self._shapes[key.model]
        while most * size > self._longest[key.model]:
            most //= 2
        if most < 2:
            return None
        for depth in range(max(map(len, places)), -1, -1):
            candidates, places = self._neighbours(depth, most, places)
            for at_once, (numbers, found) in candidates.items():
                columns = [numbers[column::at_once] for column in range(at_once)]
                freed_bytes = at_once * shape.parameter_bytes(size)
                freed_bytes -= shape.parameter_bytes(at_once * size)
                self._merge(key, at_once * size, freed_bytes, columns, found)
            if self.missing_bytes <= 0:
                return None
        return next((here[0] for here in places.values()), None)

    def _neighbours(
        self, depth: int, most: int, places: _Places
    ) -> tuple[dict[int, _Candidates], _Places]:
        """Groups that may merge at places of that depth: `most` at once, then half as many, …

        Groups that are left over merge at the next wider places.
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
            # Groups with least KV merge; the one left over has most. Unless all become one.
            if len(here) not in candidates:
                here.sort(key=kv_bytes_of)
            left = len(here)
            for at_once, (numbers, found) in candidates.items():
                if at_once <= left:
                    count, rest = divmod(left, at_once)
                    found[place] = count
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
        found: Mapping[Location, int],
    ) -> None:
        """Merge as many of the candidates as are needed, those with least KV to exchange first.

        Each takes one group of every column, gets `size` members and frees `each_bytes`. `found`:
        how many there are at each place, in their order.
        """
        kv_bytes = _sums(self._kv_bytes, columns)
        count = max(0, -(-self.missing_bytes // each_bytes))
        if count < len(kv_bytes):
            least = sorted(range(len(kv_bytes)), key=kv_bytes.__getitem__)[:count]
            columns = [[column[index] for index in least] for column in columns]
        elif 0 < len(kv_bytes) < count:
            # Otherwise these are the last, and no group remains to merge with them.
            places, number = self._places(key, size), len(self._sources)
            for place, here in found.items():
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
    """The sums over all columns of the values at these indices."""
    first, *others = (map(values.__getitem__, column) for column in columns)
    return list(reduce(partial(map, add), others, first))


def _middle(member: PlanMember) -> int:
    """Twice the middle of the layers that it runs."""
    return member.first_layer + member.end_layer


def _common(one: Location, other: Location) -> Location:
    """The narrowest place that has both in it."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return one[:count]
