"""The groups of one model, kept in order of score, so that a pick looks at few of a thousand.

A change of a load costs little: a touched group takes its new place at the next pick.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from services.core.request import admission_blocks
from services.core.scheduler.dispatch import (
    NOBODY,
    Score,
    ScoreFunction,
    could_hold,
    has_room,
    serves,
)
from services.core.scheduler.group_load import GroupLoad

FEW = 64
"""Up to this many groups with room are compared directly; else a search by score is short."""

_Ranked = tuple[bool, Score, str]
_Room = tuple[int, str]


@dataclass(slots=True)
class _Places:
    """Groups with blocks of one size: ranked by score, and by room to skip those without."""

    ranked: list[_Ranked] = field(default_factory=list)
    rooms: list[_Room] = field(default_factory=list)


@dataclass(slots=True)
class GroupIndex:
    """Picks as if it filtered and scored every group; a lower `score` is better.

    Groups whose workers come and go are behind all others.
    Call `touch` after each change of a group's load.
    """

    score: ScoreFunction
    loads: dict[str, GroupLoad] = field(default_factory=dict)
    _places: dict[int, _Places] = field(default_factory=dict)  # by block size
    _placed: dict[str, tuple[_Ranked, _Room, int]] = field(default_factory=dict)
    _touched: dict[str, GroupLoad] = field(default_factory=dict)
    _lapses: list[tuple[float, str]] = field(default_factory=list)  # a heap
    _tokens: dict[str, int] = field(default_factory=dict)  # longest sequence of each
    _tokens_max: int | None = None
    _tokens_changed: bool = False

    def add(self, load: GroupLoad) -> None:
        """Take in a group that is not in the index."""
        self.loads[load.group.group_id] = load
        self.touch(load)

    def remove(self, group_id: str) -> None:
        """Forget a group that is in the index."""
        del self.loads[group_id], self._tokens[group_id]
        self._tokens_changed = True
        self._touched.pop(group_id, None)
        self._unplace(group_id)

    @property
    def block_size(self) -> int:
        """Token slots in a block of some group; there is one."""
        return next(iter(self.loads.values())).group.block_size

    @property
    def tokens_max(self) -> int | None:
        """Longest sequence that some group holds if it is alone; None without groups."""
        if self._tokens_changed:
            self._tokens_max = max(self._tokens.values(), default=None)
            self._tokens_changed = False
        return self._tokens_max

    def touch(self, load: GroupLoad) -> None:
        """The load of a group of this index has changed."""
        group_id, tokens = load.group.group_id, load.tokens_max
        self._touched[group_id] = load
        if self._tokens.get(group_id) != tokens:
            self._tokens[group_id] = tokens
            self._tokens_changed = True

    def reserve(
        self, load: GroupLoad, request_id: str, blocks: int, now_s: float, prefill_tokens: int = 0
    ) -> None:
        """Hold blocks of a group for a new assignment; see `GroupLoad.reserve`."""
        lapses_s = load.reserve(request_id, blocks, now_s, prefill_tokens)
        heapq.heappush(self._lapses, (lapses_s, load.group.group_id))
        self.touch(load)

    def drop_lapsed(self, now_s: float) -> None:
        """Drop the reservations whose time is over."""
        while self._lapses and self._lapses[0][0] <= now_s:
            _, group_id = heapq.heappop(self._lapses)
            load = self.loads.get(group_id)
            if load is not None:
                load.drop_lapsed(now_s)
                self.touch(load)

    @property
    def tokens_min(self) -> int:
        """The least that a group holds of a sequence that is alone in it; there is a group."""
        return min(self._tokens.values())

    def pick(
        self,
        prompt_tokens: int,
        max_tokens: int,
        now_s: float,
        below_tokens: float = inf,
        avoided: frozenset[str] = NOBODY,
        online: bool = True,
    ) -> GroupLoad | None:
        """The group with the best score among those that can start the request now, or None.

        Only groups count that could not hold a sequence of `below_tokens`, and whose address is
        not `avoided`. For a request that is not `online` nobody yields.
        """
        found = self.best(prompt_tokens, max_tokens, now_s, below_tokens, avoided, online)
        return found[0] if found else None

    def best(
        self,
        prompt_tokens: int,
        max_tokens: int,
        now_s: float,
        below_tokens: float = inf,
        avoided: frozenset[str] = NOBODY,
        online: bool = True,
        most: int = 1,
    ) -> list[GroupLoad]:
        """Up to `most` groups as `pick` would pick them one after the other, the best first."""
        self._settle()
        found: list[_Ranked] = []
        for block_size, places in self._places.items():
            needed = admission_blocks(prompt_tokens, prompt_tokens + max_tokens, block_size)
            able = (
                ranked
                for ranked in self._with_room(places, needed)
                if self.can_start(
                    self.loads[ranked[-1]],
                    prompt_tokens,
                    max_tokens,
                    now_s,
                    below_tokens,
                    avoided,
                    online,
                )
            )
            found += islice(able, most)
        return [self.loads[ranked[-1]] for ranked in sorted(found)[:most]]

    def idle(self, prompt_tokens: int, max_tokens: int, now_s: float) -> GroupLoad | None:
        """As `pick`, among the groups in which nothing runs or waits, so that nobody can yield."""
        able = [
            self._ranked(load)
            for load in self.loads.values()
            if load.is_idle and self.can_start(load, prompt_tokens, max_tokens, now_s)
        ]
        return self.loads[min(able)[-1]] if able else None

    @staticmethod
    def can_start(
        load: GroupLoad,
        prompt_tokens: int,
        max_tokens: int,
        now_s: float,
        below_tokens: float = inf,
        avoided: frozenset[str] = NOBODY,
        online: bool = True,
    ) -> bool:
        """Whether a group passes all filters; the last three as in `pick`."""
        return (
            has_room(load, prompt_tokens, max_tokens, online)
            and could_hold(load, prompt_tokens, max_tokens)
            and load.tokens_max < below_tokens
            and load.group.address not in avoided
            and serves(load, now_s)
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if an order disagrees with the loads."""
        longest = max((load.tokens_max for load in self.loads.values()), default=None)
        assert self.tokens_max == longest
        self._settle()
        assert set(self._placed) == set(self.loads)
        ranked = [entry for places in self._places.values() for entry in places.ranked]
        rooms = [entry for places in self._places.values() for entry in places.rooms]
        assert sorted(ranked) == sorted(map(self._ranked, self.loads.values()))
        assert sorted(rooms) == sorted((one.start_blocks, key) for key, one in self.loads.items())
        for places in self._places.values():
            assert places.ranked == sorted(places.ranked) and places.rooms == sorted(places.rooms)

    def _ranked(self, load: GroupLoad) -> _Ranked:
        return load.flaps, self.score(load), load.group.group_id

    def _with_room(self, places: _Places, needed: int) -> list[_Ranked]:
        """By score, all that have room for `needed` blocks, and perhaps others."""
        first = bisect_left(places.rooms, (needed, ""))
        if len(places.rooms) - first > FEW:
            return places.ranked
        return sorted(self._placed[group_id][0] for _, group_id in places.rooms[first:])

    def _settle(self) -> None:
        """Give every touched group its place."""
        for group_id, load in self._touched.items():
            self._unplace(group_id)
            block_size = load.group.block_size
            places = self._places.setdefault(block_size, _Places())
            ranked, room = self._ranked(load), (load.start_blocks, group_id)
            insort(places.ranked, ranked)
            insort(places.rooms, room)
            self._placed[group_id] = ranked, room, block_size
        self._touched.clear()

    def _unplace(self, group_id: str) -> None:
        placed = self._placed.pop(group_id, None)
        if placed is None:
            return
        ranked, room, block_size = placed
        places = self._places[block_size]
        del places.ranked[bisect_left(places.ranked, ranked)]
        del places.rooms[bisect_left(places.rooms, room)]
        if not places.ranked:
            del self._places[block_size]
