"""Rebalancing: which running requests move with their KV between single workers (Llumnix §4).

A group whose requests need more KV than it has (*short*) preempts some of them although other
groups have room, so their KV moves there first. Three causes, in this order:

* FULL: a group is short, or will be after `GROWTH_TOKENS` more of each of its requests. It hands
  over what it lacks to the group with the most room.
* LARGE, with `rebalance: all`: a queued request is larger than the free KV of each group, but not
  than that of all together. The group with the most free KV hands over as much as is missing.
* UNEVEN, with the policy `migrate`: a group can decode for far fewer iterations than others.

Damping: a group takes part in one move at a time and then rests for `REST_S`; one that received
requests moves none away for `STAY_S`, unless its requests wait. A pair whose last move failed backs
off instead. Amounts are KV in tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.core.groups.backoff import Backoff
from services.core.overload.events import Cause, GroupUse

GROWTH_TOKENS, GROWTH_SHARE = 64, 0.1
"""Tokens by which each running request of a group may grow before the group counts as short; all
together at most this share of its capacity."""
REST_S = 1.0
"""Time after a move for which its groups take part in none, so that reports show its effect."""
STAY_S = 5.0
"""Time for which a group keeps requests that it has received, unless its requests wait."""
MOVE_MAX_S = 30.0
"""Time after which a move counts as over, even if its end was not reported."""
BACKOFF_S, BACKOFF_MAX_S = 1.0, 30.0
"""Pause of a pair after a move of no request; it doubles up to the maximum."""
UNEVEN_LOW, UNEVEN_HIGH = 0.2, 2.0
"""UNEVEN: the least number of iterations left is below this share of the mean, and the largest
above this multiple of the least."""
UNEVEN_REQUESTS = 8
"""Maximum number of requests of a move for UNEVEN."""


@dataclass(frozen=True, slots=True)
class Move:
    """Requests with at most `tokens` of KV move from a group to another, at most `requests`.

    `requests` 0: no limit.
    """

    source_id: str
    target_id: str
    tokens: int
    cause: Cause
    requests: int = 0


@dataclass(slots=True)
class Rebalancer:
    """State machine of the moves of a model: which are under way, and which groups rest."""

    _under_way: dict[tuple[str, str], float] = field(default_factory=dict)  # begin, by pair
    _rest_until_s: dict[str, float] = field(default_factory=dict)  # by group
    _stay_until_s: dict[str, float] = field(default_factory=dict)  # by group that received
    _backoff: Backoff = field(default_factory=Backoff)  # by pair
    _short_since_s: dict[str, float] = field(default_factory=dict)  # by group that is stuck

    def note_groups(self, groups: Iterable[GroupUse], now_s: float) -> None:
        """Record the serving groups; forget all others, and moves without an end."""
        seen = {group.group_id: group for group in groups}
        self._under_way = {
            pair: since_s
            for pair, since_s in self._under_way.items()
            if now_s - since_s < MOVE_MAX_S
        }
        for times in (self._rest_until_s, self._stay_until_s):
            for group_id in [name for name, at_s in times.items() if at_s <= now_s]:
                del times[group_id]
        self._short_since_s = {
            group_id: self._short_since_s.get(group_id, now_s)
            for group_id, group in seen.items()
            if group.members and group.stuck_tokens
        }

    def note_over(self, source_id: str, target_id: str, moved: int | None, now_s: float) -> None:
        """Record the end of a move of `moved` requests; None: it was not tried."""
        if self._under_way.pop((source_id, target_id), None) is None:
            return
        pair = [_name(source_id, target_id)]
        if moved == 0:
            # Nothing changes, so that reports need no time: another group, or a merge, may help.
            self._backoff.note_failure(pair, now_s, BACKOFF_S, BACKOFF_MAX_S)
            return
        self._rest_until_s |= {source_id: now_s + REST_S, target_id: now_s + REST_S}
        if moved:
            self._stay_until_s[target_id] = now_s + STAY_S
            self._backoff.note_success(pair)

    def may_help(self, groups: Sequence[GroupUse], within_s: float, now_s: float) -> bool:
        """Whether moves may still free all groups that are stuck, none for `within_s` or longer."""
        busy = {group_id for pair in self._under_way for group_id in pair}
        for group in groups:
            if not group.stuck_tokens:
                continue
            if now_s - self._short_since_s.get(group.group_id, now_s) >= within_s:
                return False
            rests = group.group_id in busy or group.group_id in self._rest_until_s
            if not rests and self._target(group, groups, now_s) is None:
                return False
        return True

    def choose(
        self,
        groups: Sequence[GroupUse],
        now_s: float,
        *,
        first_queued_tokens: int = 0,
        evenly: bool = False,
    ) -> list[Move]:
        """The moves to begin now; they are under way until `note_over`.

        `first_queued_tokens`: KV that the first request in the queue needs to start, 0: make no
        room for it. `evenly`: also for UNEVEN.
        """
        moves = self._of_full(groups, now_s)
        if not moves and first_queued_tokens:
            moves = self._for_large(groups, first_queued_tokens, now_s)
        if not moves and evenly:
            moves = self._of_uneven(groups, now_s)
        return moves

    def _of_full(self, groups: Sequence[GroupUse], now_s: float) -> list[Move]:
        """Moves away from short groups, those that lack most first."""
        moves = []
        for group in sorted(groups, key=lambda group: (-_lack(group), group.group_id)):
            if _lack(group) <= 0 or not self._may_give(group, now_s):
                continue
            target = self._target(group, groups, now_s)
            if target is not None:
                tokens = min(_amount(group, _lack(group) + _growth(group)), _room(target))
                moves.append(self._begin(group, target, tokens, Cause.FULL, now_s))
        return moves

    def _for_large(self, groups: Sequence[GroupUse], tokens: int, now_s: float) -> list[Move]:
        """A move away from the group with the most free KV, to let a large request start there."""
        able = [group for group in groups if group.kv_layout and not group.draining]
        if len(able) < 2:
            return []
        emptiest, *others = sorted(able, key=lambda group: (-_free(group), group.group_id))
        missing = tokens - _free(emptiest)
        fits = tokens <= emptiest.capacity_tokens
        if missing <= 0 or not fits or not self._may_give(emptiest, now_s):
            return []
        for target in others:
            pair = _name(emptiest.group_id, target.group_id)
            same = target.kv_layout == emptiest.kv_layout
            amount = _amount(emptiest, missing)
            ready = self._is_ready(target) and not self._backoff.wait_s([pair], now_s)
            if same and ready and _room(target) >= amount:
                return [self._begin(emptiest, target, amount, Cause.LARGE, now_s)]
        return []

    def _of_uneven(self, groups: Sequence[GroupUse], now_s: float) -> list[Move]:
        """A move from the group with the fewest iterations left to the one with the most."""
        ready = [g for g in groups if g.kv_layout and not g.draining and self._is_ready(g)]
        if len(ready) < 2:
            return []
        least, *_, most = sorted(ready, key=lambda group: (_iterations(group), group.group_id))
        mean = sum(map(_iterations, ready)) / len(ready)
        low, high = _iterations(least), _iterations(most)
        if low >= UNEVEN_LOW * mean or high <= UNEVEN_HIGH * low or least.running < 2:
            return []
        pair = _name(least.group_id, most.group_id)
        blocked = least.kv_layout != most.kv_layout or self._backoff.wait_s([pair], now_s)
        tokens = min((_free(most) - _free(least)) // 2, _room(most))
        if blocked or tokens <= 0 or not self._may_give(least, now_s):
            return []
        return [self._begin(least, most, tokens, Cause.UNEVEN, now_s, UNEVEN_REQUESTS)]

    def _begin(
        self,
        source: GroupUse,
        target: GroupUse,
        tokens: int,
        cause: Cause,
        now_s: float,
        requests: int = 0,
    ) -> Move:
        self._under_way[source.group_id, target.group_id] = now_s
        return Move(source.group_id, target.group_id, tokens, cause, requests)

    def _target(
        self, source: GroupUse, groups: Sequence[GroupUse], now_s: float
    ) -> GroupUse | None:
        """The group with the most room for requests of a group; None if none has enough."""
        # Growth of the source is left out: any move gives it more time.
        needed = _amount(source, source.stuck_tokens)
        fitting = [
            group
            for group in groups
            if group is not source
            and group.kv_layout == source.kv_layout != ""
            and not group.draining
            and self._is_ready(group)
            and _room(group) >= needed
            and not self._backoff.wait_s([_name(source.group_id, group.group_id)], now_s)
        ]
        return max(fitting, key=lambda group: (_room(group), group.group_id), default=None)

    def _may_give(self, group: GroupUse, now_s: float) -> bool:
        """Whether a group may hand requests over now."""
        if not group.kv_layout or group.draining or not self._is_ready(group):
            return False
        stays = now_s < self._stay_until_s.get(group.group_id, now_s)
        return bool(group.running) and (not stays or group.stuck_tokens > 0)

    def _is_ready(self, group: GroupUse) -> bool:
        """Whether a group neither takes part in a move nor rests after one."""
        under_way = any(group.group_id in pair for pair in self._under_way)
        return not under_way and group.group_id not in self._rest_until_s


def _name(source_id: str, target_id: str) -> str:
    return f"{source_id} to {target_id}"


def _free(group: GroupUse) -> int:
    """KV that neither running nor waiting requests need; negative if the group is stuck."""
    return group.capacity_tokens - group.used_tokens - group.waiting_tokens


def _growth(group: GroupUse) -> int:
    return min(group.running * GROWTH_TOKENS, round(GROWTH_SHARE * group.capacity_tokens))


def _lack(group: GroupUse) -> int:
    """KV that a group lacks, now or after some growth; at most 0 if it has enough."""
    return _growth(group) - _free(group)


def _room(group: GroupUse) -> int:
    """KV that a group can receive without being short soon after."""
    return _free(group) - 2 * _growth(group)


def _amount(group: GroupUse, tokens: int) -> int:
    """An amount of at least `tokens` that some request of the group does not exceed."""
    return max(tokens, -(-group.used_tokens // max(1, group.running)))


def _iterations(group: GroupUse) -> float:
    """Iterations that all requests of a group can still run (Llumnix' freeness)."""
    return _free(group) / max(1, group.running)
