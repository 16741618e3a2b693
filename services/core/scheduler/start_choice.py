"""Chooses the waiting request that starts next, and its group.

The queue orders the requests, `overtaking` bounds how often later ones start before earlier ones,
and `ModelGroups.pick` ranks the groups.
"""

from dataclasses import dataclass, field
from math import inf

from services.core.overtaking import count_overtaken, next_to_start
from services.core.scheduler.adapter_places import AdapterPlaces, supports
from services.core.scheduler.class_rules import ClassRules
from services.core.scheduler.dispatch import NO_ADDRESSES, could_hold
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.group_table import ModelGroups
from services.core.scheduler.queue import Waiting, WaitQueue


@dataclass(slots=True)
class StartChoice:
    """A single choice among the requests that wait for the model `name`; call `choose` once."""

    queue: WaitQueue
    rules: ClassRules
    name: str
    model: ModelGroups
    overtaken_max: int
    now_s: float
    _places: AdapterPlaces = field(init=False)
    _picked: GroupLoad | None = None
    # Groups that can hold this many tokens are kept for an overtaken request.
    _held_tokens: float = inf
    # Addresses of groups that are kept for an overtaken request with an adapter.
    _held: frozenset[str] = NO_ADDRESSES
    # Groups that can hold this many tokens start no batch request.
    _kept_tokens: float = field(init=False)
    # Skip groups with a prefill backlog.
    _spread: bool = False

    def __post_init__(self) -> None:
        self._places = AdapterPlaces(self.model.index.loads.values(), self.overtaken_max)
        self._kept_tokens = self._tokens_kept_from_batch()

    def choose(self) -> tuple[Waiting, GroupLoad] | None:
        """The request that starts now, and its group; None if none may."""
        queue = (
            waiting
            for waiting in self.queue.in_order(self.name)
            if self.model.can_hold(waiting.ask) and self._places.admits(waiting)
        )
        first = next_to_start(queue, self._pick_group, self.overtaken_max, self._hold_groups)
        if first is None or self._picked is None:
            return None
        count_overtaken(self.queue.in_order(self.name), first, self._could_use)
        return first, self._picked

    def _pick_group(self, waiting: Waiting) -> bool:
        ask, model, now_s = waiting.ask, self.model, self.now_s
        closed = self._held | self._places.closed_to(ask.adapter)
        self._spread = self._spread or now_s < waiting.spread_until_s
        if now_s < waiting.alone_until_s:
            # The request may crash an engine: start it where no other request runs.
            index = model.index_for(ask)
            self._picked = index.idle(ask.prompt_tokens, ask.max_tokens, now_s, closed)
            return self._picked is not None
        below_tokens = self._held_tokens
        if self.rules.is_batch(ask.service):
            below_tokens = min(below_tokens, self._kept_tokens)
        avoided = waiting.avoided(now_s)
        closed |= self._closed_to(waiting)
        if ask.adapter is None:
            self._picked = model.pick(
                *(ask, now_s, below_tokens, avoided), spread=self._spread, closed=closed
            )
        else:
            self._picked = model.pick_with_adapter(
                *(ask, now_s, below_tokens, avoided),
                spread=self._spread,
                closed=closed,
                waited_s=now_s - waiting.arrival_s,
            )
        return self._picked is not None

    def _hold_groups(self, waiting: Waiting) -> bool:
        """Keep groups for an overtaken request; returns whether all groups are kept."""
        # A request that waits for an idle group must not block the queue.
        if self.now_s < waiting.alone_until_s:
            return False
        ask, index = waiting.ask, self.model.index
        if ask.adapter is not None:
            # It can use only some of the groups, so it keeps only those.
            self._held |= self._places.usable(waiting)
            return len(self._held) == len(index.loads)
        self._held_tokens = min(self._held_tokens, ask.prompt_tokens + ask.max_tokens)
        return index.tokens_min >= self._held_tokens

    def _could_use(self, waiting: Waiting) -> bool:
        ask, picked = waiting.ask, self._picked
        if picked is None or (ask.adapter is not None and not supports(picked, ask.adapter)):
            return False
        return could_hold(picked, ask.prompt_tokens, ask.max_tokens)

    def _closed_to(self, waiting: Waiting) -> frozenset[str]:
        """Addresses of groups that still prefill requests of another bucket.

        Else an iteration would mix lengths at every change of the bucket.
        """
        bucket_of = self.queue.bucket_index(waiting)
        if bucket_of is None:
            return NO_ADDRESSES
        bucket, classes = bucket_of(waiting.length), self.model.batch_index is not None
        return frozenset(
            load.group.address
            for load in self.model.index.loads.values()
            if load.bucketed_length
            and bucket_of(load.bucketed_length) != bucket
            and load.has_bucketed_prefill(classes)
        )

    def _tokens_kept_from_batch(self) -> float:
        """Sequence length in tokens: groups that can hold it start no batch request.

        It is the length of the shortest waiting online request. `inf` if none waits, or if groups
        are partitioned by class (`batch_groups`), since those never compete.
        """
        least = inf
        if not self.rules.enabled or self.model.partitioned:
            return least
        if not self.queue.demand(self.name, self.rules.demand_classes)[0]:
            return least
        tokens_min = self.model.index.tokens_min
        for waiting in self.queue.in_order(self.name):
            if waiting.ask.service.online:
                least = min(least, waiting.ask.prompt_tokens + waiting.ask.max_tokens)
                if least <= tokens_min:
                    break  # every group can hold this: all of them are kept already
        return least
