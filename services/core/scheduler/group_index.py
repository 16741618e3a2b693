"""Index of a model's worker groups by score and room, from which the scheduler picks a group.

The index lets a pick examine only a few of a thousand groups. A load change only marks its group,
which the next pick sorts again. Room is the number of KV blocks in which a new request may start.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from services.core.adapter import Adapter
from services.core.request import admission_blocks
from services.core.role import Role
from services.core.scheduler.dispatch import (
    NO_ADDRESSES,
    RoomFunction,
    Score,
    ScoreFunction,
    could_hold,
    has_room,
    serves,
    start_blocks,
)
from services.core.scheduler.group_load import GroupLoad

DIRECT_MAX = 64
"""Up to this many groups with room are sorted for a pick; with more, all groups are searched by
score, since one of the first probably has room."""

_Ranked = tuple[bool, Score, str]
"""Sort key of a group: whether its worker often leaves and returns (flaps), score, group id."""
_Room = tuple[int, str]
"""Blocks of room, and the group id."""


@dataclass(slots=True)
class _SameBlockSize:
    """Groups with the same KV block size, sorted by score, and by room to skip full groups."""

    ranked: list[_Ranked] = field(default_factory=list)
    rooms: list[_Room] = field(default_factory=list)


@dataclass(slots=True)
class GroupIndex:
    """Picks the group with the lowest score among those that pass the filters.

    Groups whose worker flaps rank behind all others. Call `touch` after each change of a group's
    load.
    """

    score: ScoreFunction
    # Blocks in which a request may start.
    room: RoomFunction = start_blocks
    # All groups by id.
    loads: dict[str, GroupLoad] = field(default_factory=dict)
    # The sorted groups, by block size.
    _by_block_size: dict[int, _SameBlockSize] = field(default_factory=dict)
    # By group id: its two entries in `_by_block_size`, and its block size.
    _entries: dict[str, tuple[_Ranked, _Room, int]] = field(default_factory=dict)
    # Groups whose load has changed since they were sorted.
    _touched: dict[str, GroupLoad] = field(default_factory=dict)
    # Heap of expiry times of reservations, with group ids.
    _expiries: list[tuple[float, str]] = field(default_factory=list)
    # Longest sequence, in tokens, that each group can hold, and a cache of the maximum.
    _tokens: dict[str, int] = field(default_factory=dict)
    _tokens_max: int | None = None
    _tokens_changed: bool = False

    def add(self, load: GroupLoad) -> None:
        """Add a group that is not in the index."""
        self.loads[load.group.group_id] = load
        self.touch(load)

    def remove(self, group_id: str) -> None:
        """Remove a group that is in the index."""
        del self.loads[group_id], self._tokens[group_id]
        self._tokens_changed = True
        self._touched.pop(group_id, None)
        self._remove_entry(group_id)

    @property
    def block_size(self) -> int:
        """Token slots per block, of an arbitrary group; the index must not be empty."""
        return next(iter(self.loads.values())).group.block_size

    @property
    def tokens_max(self) -> int | None:
        """Longest sequence that some group can hold alone, in tokens; None without groups."""
        if self._tokens_changed:
            self._tokens_max = max(self._tokens.values(), default=None)
            self._tokens_changed = False
        return self._tokens_max

    def touch(self, load: GroupLoad) -> None:
        """Mark a group whose load has changed."""
        group_id, tokens = load.group.group_id, load.tokens_max
        self._touched[group_id] = load
        if self._tokens.get(group_id) != tokens:
            self._tokens[group_id] = tokens
            self._tokens_changed = True

    def reserve(
        self,
        load: GroupLoad,
        request_id: str,
        blocks: int,
        now_s: float,
        prefill_tokens: int = 0,
        batch: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        """Reserve blocks of a group for a new assignment; see `GroupLoad.reserve`."""
        expires_s = load.reserve(request_id, blocks, now_s, prefill_tokens, batch, adapter)
        heapq.heappush(self._expiries, (expires_s, load.group.group_id))
        self.touch(load)

    def remove_expired(self, now_s: float) -> list[GroupLoad]:
        """Remove expired reservations; returns the groups that may have had any."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now_s:
            _, group_id = heapq.heappop(self._expiries)
            load = self.loads.get(group_id)
            if load is not None:
                load.remove_expired(now_s)
                self.touch(load)
                expired.append(load)
        return expired

    @property
    def tokens_min(self) -> int:
        """Longest sequence in tokens that every group can hold; the index must not be empty."""
        return min(self._tokens.values())

    def pick(
        self,
        prompt_tokens: int,
        max_tokens: int,
        now_s: float,
        below_tokens: float = inf,
        avoided: frozenset[str] = NO_ADDRESSES,
    ) -> GroupLoad | None:
        """The best-scored group that can start the request now, or None.

        Groups that could hold a sequence of `below_tokens` and groups at `avoided` addresses are
        skipped.
        """
        best = self.best(prompt_tokens, max_tokens, now_s, below_tokens, avoided)
        return best[0] if best else None

    def best(
        self,
        prompt_tokens: int,
        max_tokens: int,
        now_s: float,
        below_tokens: float = inf,
        avoided: frozenset[str] = NO_ADDRESSES,
        limit: int = 1,
        role: Role | None = None,
    ) -> list[GroupLoad]:
        """Up to `limit` groups that can start the request now, best score first; see `pick`.

        `role`: only groups that have it.
        """
        self._sort_touched()
        best: list[_Ranked] = []
        # The number of blocks that the request needs depends on the block size.
        for block_size, same_size in self._by_block_size.items():
            needed = admission_blocks(prompt_tokens, prompt_tokens + max_tokens, block_size)
            able = (
                ranked
                for ranked in self._with_room(same_size, needed)
                if (role is None or self.loads[ranked[-1]].group.role is role)
                and self.can_start(
                    self.loads[ranked[-1]],
                    prompt_tokens,
                    max_tokens,
                    now_s,
                    below_tokens,
                    avoided,
                )
            )
            best += islice(able, limit)
        return [self.loads[ranked[-1]] for ranked in sorted(best)[:limit]]

    def ranked(self, limit: int) -> list[GroupLoad]:
        """Up to `limit` groups per block size, best score first."""
        self._sort_touched()
        return [
            self.loads[ranked[-1]]
            for same_size in self._by_block_size.values()
            for ranked in same_size.ranked[:limit]
        ]

    def idle(
        self,
        prompt_tokens: int,
        max_tokens: int,
        now_s: float,
        avoided: frozenset[str] = NO_ADDRESSES,
    ) -> GroupLoad | None:
        """As `pick`, among groups without requests."""
        able = [
            self._ranked(load)
            for load in self.loads.values()
            if load.is_idle
            and self.can_start(load, prompt_tokens, max_tokens, now_s, avoided=avoided)
        ]
        return self.loads[min(able)[-1]] if able else None

    def can_start(
        self,
        load: GroupLoad,
        prompt_tokens: int,
        max_tokens: int,
        now_s: float,
        below_tokens: float = inf,
        avoided: frozenset[str] = NO_ADDRESSES,
    ) -> bool:
        """Whether a group passes all filters; arguments as in `pick`."""
        return (
            has_room(load, prompt_tokens, max_tokens, self.room)
            and could_hold(load, prompt_tokens, max_tokens)
            and load.tokens_max < below_tokens
            and load.group.address not in avoided
            and serves(load, now_s)
        )

    def check_invariants(self) -> None:
        """Raise AssertionError if a sorted list disagrees with the loads."""
        longest = max((load.tokens_max for load in self.loads.values()), default=None)
        assert self.tokens_max == longest
        self._sort_touched()
        assert set(self._entries) == set(self.loads)
        ranked = [entry for same_size in self._by_block_size.values() for entry in same_size.ranked]
        rooms = [entry for same_size in self._by_block_size.values() for entry in same_size.rooms]
        assert sorted(ranked) == sorted(map(self._ranked, self.loads.values()))
        assert sorted(rooms) == sorted((self.room(load), key) for key, load in self.loads.items())
        for same_size in self._by_block_size.values():
            assert same_size.ranked == sorted(same_size.ranked) and (
                same_size.rooms == sorted(same_size.rooms)
            )

    def _ranked(self, load: GroupLoad) -> _Ranked:
        return load.flaps, self.score(load), load.group.group_id

    def _with_room(self, same_size: _SameBlockSize, needed: int) -> list[_Ranked]:
        """Groups by score, including all with `needed` blocks of room; others may be among them."""
        first = bisect_left(same_size.rooms, (needed, ""))
        # With many candidates the best-scored groups most likely have room: search by score.
        if len(same_size.rooms) - first > DIRECT_MAX:
            return same_size.ranked
        return sorted(self._entries[group_id][0] for _, group_id in same_size.rooms[first:])

    def _sort_touched(self) -> None:
        """Sort every group whose load has changed to its new position."""
        for group_id, load in self._touched.items():
            self._remove_entry(group_id)
            block_size = load.group.block_size
            same_size = self._by_block_size.setdefault(block_size, _SameBlockSize())
            ranked, room = self._ranked(load), (self.room(load), group_id)
            insort(same_size.ranked, ranked)
            insort(same_size.rooms, room)
            self._entries[group_id] = ranked, room, block_size
        self._touched.clear()

    def _remove_entry(self, group_id: str) -> None:
        entry = self._entries.pop(group_id, None)
        if entry is None:
            return
        ranked, room, block_size = entry
        same_size = self._by_block_size[block_size]
        del same_size.ranked[bisect_left(same_size.ranked, ranked)]
        del same_size.rooms[bisect_left(same_size.rooms, room)]
        if not same_size.ranked:
            del self._by_block_size[block_size]
