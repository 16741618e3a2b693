"""Dispatch by roles: prefill groups compute prompts, and hand the requests over to decode groups.

A role is advice. It never excludes a group: it adds a *penalty* to the predicted TTFT there, in
seconds. So a decode group that has most of a prompt cached, such as the earlier turns of a chat,
still gets the next turn, and so does one that is idle. Without roles nothing is added.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from services.core.ask import Ask
from services.core.cost.model import CostModel
from services.core.destination import Destination
from services.core.prefix.block_hash import ThinHashes
from services.core.role import Role
from services.core.scheduler.dispatch import (
    NO_ADDRESSES,
    could_hold,
    has_room,
    serves,
    start_blocks,
)
from services.core.scheduler.group_index import GroupIndex
from services.core.scheduler.group_load import GroupLoad

STALL_WEIGHT = 0.5
"""Weight of a second for which a running request gets no token, against one of a first token."""
LONG_SHARE = 1 / 8
"""Default of `hand_over_min_tokens`, over `max_batch_tokens`. Shorter prompts hardly delay answers,
and their hand-over takes as long as their computation."""
HOMES_MAX = 10_000
"""Requests that were handed over whose group is remembered."""
FULL_ITERATIONS = 4
"""Penalty of a request that decodes at a prefill group, in iterations full of prompts: it gets a
token only after each of them."""


@dataclass(slots=True)
class RoleDispatch:
    """The groups of a model that have a role, and what their roles cost a request.

    `min_tokens`: least prompt tokens to compute for which a request is handed over; None: the part
    `LONG_SHARE` of what an iteration of the group takes.
    """

    min_tokens: int | None = None
    # Groups that are not mixed, by id.
    _loads: dict[str, GroupLoad] = field(default_factory=dict)
    # The group to which a request was handed over, by the last hash of its prompt; oldest first.
    _homes: OrderedDict[int, str] = field(default_factory=OrderedDict)

    @property
    def active(self) -> bool:
        """Whether any group has a role."""
        return bool(self._loads)

    def note(self, load: GroupLoad) -> None:
        """Note the role of a group, which may have changed."""
        self._loads.pop(load.group.group_id, None)
        if load.group.role is not Role.MIXED:
            self._loads[load.group.group_id] = load

    def remove(self, group_id: str) -> None:
        """Remove a group."""
        self._loads.pop(group_id, None)

    def note_moved(self, group_id: str, prefix: ThinHashes) -> None:
        """Note that a request was handed over to a group, which has the KV of its answer, too."""
        if not prefix.hashes:
            return
        self._homes.pop(prefix.hashes[-1], None)
        if len(self._homes) >= HOMES_MAX:
            self._homes.popitem(last=False)
        self._homes[prefix.hashes[-1]] = group_id

    def home(self, prefix: ThinHashes) -> GroupLoad | None:
        """The decode group that computed the answer before this turn of a chat; None if unknown."""
        for thin_hash in reversed(prefix.hashes):
            load = self._loads.get(self._homes.get(thin_hash, ""))
            if load is not None:
                return load if load.group.role is Role.DECODE else None
        return None

    def of_role(self, role: Role) -> Iterator[GroupLoad]:
        """The groups with a role."""
        return (load for load in self._loads.values() if load.group.role is role)

    def busy(
        self,
        ask: Ask,
        now_s: float,
        below_tokens: float = inf,
        avoided: frozenset[str] = NO_ADDRESSES,
    ) -> Iterator[GroupLoad]:
        """Prefill groups with KV for an online request, whatever prompts wait there.

        A request may wait there rather than stall the answers of a decode group. The penalty of
        the decode groups bounds the wait.
        """
        if not ask.service.online:
            return
        for load in self.of_role(Role.PREFILL):
            if (
                load.tokens_max < below_tokens
                and load.group.address not in avoided
                and _can_hold(load, ask, now_s)
            ):
                yield load

    def target(self, groups: GroupIndex, ask: Ask, now_s: float) -> GroupLoad | None:
        """The decode group with the most room for a request; None if it cannot be handed over."""
        if ask.resumed or ask.max_tokens < 2 or not self.active:
            return None
        with_room = [
            load
            for load in self.of_role(Role.DECODE)
            if load.group.members == 1 and not load.flaps and _can_hold(load, ask, now_s)
        ]
        return min(
            with_room, key=lambda load: (groups.score(load), load.group.group_id), default=None
        )

    def is_long(self, load: GroupLoad, computed: int) -> bool:
        """Whether a prompt with `computed` tokens to compute at a prefill group is handed over."""
        share = LONG_SHARE * load.group.max_batch_tokens
        least = share if self.min_tokens is None else self.min_tokens
        return load.group.role is Role.PREFILL and computed >= least

    def penalty_s(
        self, costs: CostModel, load: GroupLoad, ask: Ask, hit_tokens: int, has_target: bool
    ) -> float:
        """Seconds that count beside the predicted TTFT of a request at a group.

        `has_target`: a decode group could take the request over.
        """
        computed = ask.prompt_tokens - hit_tokens
        match load.group.role:
            case Role.DECODE:
                # Each of its running requests waits for the prompt.
                return STALL_WEIGHT * load.running * costs.chunk_s(hit_tokens, computed)
            case Role.PREFILL:
                leaves = ask.max_tokens == 1 or (has_target and self.is_long(load, computed))
                full_s = costs.beyond_knee.chunk_s(0, load.group.max_batch_tokens)
                return 0.0 if leaves else FULL_ITERATIONS * full_s
            case Role.MIXED:
                return 0.0


def destination_of(load: GroupLoad) -> Destination:
    """Where a request goes that is handed over to a group."""
    group = load.group
    return Destination(group.worker_id, group.address, group.group_id, group.epoch)


def _can_hold(load: GroupLoad, ask: Ask, now_s: float) -> bool:
    """Whether a group has KV for a request now, and may take it."""
    return (
        has_room(load, ask.prompt_tokens, ask.max_tokens, start_blocks)
        and could_hold(load, ask.prompt_tokens, ask.max_tokens)
        and serves(load, now_s)
    )
