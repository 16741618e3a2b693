"""Prefix-aware dispatch of the scheduler: picks the group with the lowest predicted TTFT.

The scores of `dispatch` ignore the request, but cached prefixes depend on it. So for each request
a few candidate groups are compared: those with the best score, and those with the longest cached
prefix of its prompt. A hit is a prompt token found in a group's prefix cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from math import inf, isfinite

from services.core.ask import Ask
from services.core.cost.model import CostModel, mean_model, pooled_models
from services.core.prefix.block_hash import ThinHashes
from services.core.report import Load, LoadReport
from services.core.role import Role
from services.core.scheduler.dispatch import NO_ADDRESSES
from services.core.scheduler.group_index import GroupIndex
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.prefix_index import PrefixIndex
from services.core.scheduler.role_dispatch import RoleDispatch

HALVING_PERIOD = 32
"""Requests after which all earlier hits and tokens of the hit rates are halved."""
LEEWAY = 0.05
"""Added to both hit rates, so that small differences have little effect."""
WITHOUT_LOOKUP_MAX = 64
"""Requests with predicted hits but no reported lookup after which predicted hits are ignored:
the worker has no prefix cache."""


@dataclass(slots=True)
class _Rate:
    """Cache hits per prompt token, weighted towards recent requests."""

    tokens: float = 0.0
    hits: float = 0.0

    def add(self, tokens: int, hits: float) -> None:
        self.tokens += tokens
        self.hits += hits

    def halve(self) -> None:
        self.tokens /= 2
        self.hits /= 2

    @property
    def value(self) -> float:
        return self.hits / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class HitCorrection:
    """Corrects predicted cache hits of a group by the ratio of reported to predicted hit rates.

    Rates rather than sums, because a worker looks up a prompt some time after its dispatch.
    """

    _predicted: _Rate = field(default_factory=_Rate)
    _reported: _Rate = field(default_factory=_Rate)
    # The worker's last reported totals: looked-up tokens and hits.
    _totals: tuple[int, int] | None = None
    # Requests sent since the rates were halved.
    _sent: int = 0
    # Requests with predicted hits since the worker last reported a lookup.
    _without_lookup: int = 0

    @property
    def factor(self) -> float:
        """Factor for predicted hits, 0 to 1."""
        if self._without_lookup >= WITHOUT_LOOKUP_MAX:
            return 0.0
        if not self._reported.tokens:
            return 1.0
        return min(1.0, (self._reported.value + LEEWAY) / (self._predicted.value + LEEWAY))

    def note_sent(self, prompt_tokens: int, hit_tokens: int) -> None:
        """Note a prompt that was sent to the group, with its predicted hits before correction."""
        self._predicted.add(prompt_tokens, hit_tokens)
        self._without_lookup += hit_tokens > 0
        self._sent += 1
        if self._sent == HALVING_PERIOD:
            self._sent = 0
            self._predicted.halve()
            self._reported.halve()

    def note_reported(self, queries_total: int, hits_total: int) -> None:
        """Note the worker's totals since its start: prompt tokens looked up, and hits."""
        # The first totals only serve as a base: they include lookups before this scheduler started.
        queries_before, hits_before = self._totals or (queries_total, hits_total)
        self._totals = queries_total, hits_total
        if queries_total > queries_before:
            self._without_lookup = 0
            self._reported.add(queries_total - queries_before, hits_total - hits_before)


CANDIDATES = 4
"""Number of groups by score, and again by longest match, that are compared for a request."""
MATCHES_EXAMINED = 16
"""Groups with the longest match that are examined for room."""
TTFT_TIE = 0.05
"""Predicted TTFTs up to this fraction above the lowest are ties, which the score decides."""


def predicted_ttft_s(
    cost: CostModel, load: GroupLoad, prompt_tokens: int, hit_tokens: int
) -> float:
    """Predicted seconds until the first token of a prompt of which `hit_tokens` are cached.

    It is the time of the backlog plus that of the prompt: the group first prefills its backlog,
    which its members share, and its running requests decode in each of those iterations.
    Preemptible batch requests are left out.
    """
    new = prompt_tokens - hit_tokens
    waiting = load.tokens_ahead
    # The lengths of the backlog's prompts are unknown: assume the average time of a token of this
    # prompt for each.
    token_s = (cost.beyond_knee.chunk_s(0, prompt_tokens) - cost.lam) / prompt_tokens
    iterations = -(-(waiting + new) // load.group.max_batch_tokens)
    decodes_s = cost.decodes_alone_s(load.running, load.used_tokens)
    return cost.chunk_s(hit_tokens, new) + (
        waiting * token_s / load.group.members + iterations * decodes_s
    )


PickArguments = tuple[int, int, float, float, frozenset[str]]
"""Arguments of `GroupIndex.best`, and of `GroupIndex.can_start` after its group."""


def _rank(load: GroupLoad, affinity: int) -> tuple[bytes, str]:
    """Order of groups with equal scores: by id, or for a session by a hash (rendezvous hashing)."""
    group_id = load.group.group_id
    if not affinity:
        return b"", group_id
    data = affinity.to_bytes(8) + group_id.encode()
    return blake2b(data, digest_size=8).digest(), group_id


@dataclass(slots=True)
class PrefixRanking:
    """Ranks the groups of a model for a request, by predicted TTFT.

    Groups are added and removed together with those of `GroupIndex`. `cost` predicts while no
    group's cost model is known; else a group without a model is like the mean of the others.
    """

    cost: CostModel
    index: PrefixIndex = field(default_factory=PrefixIndex)
    roles: RoleDispatch = field(default_factory=RoleDispatch)
    # By group id.
    _corrections: dict[str, HitCorrection] = field(default_factory=dict)
    _costs: dict[str, CostModel] = field(default_factory=dict)
    # Of `_costs`; None: not computed.
    _pooled: dict[str, CostModel] | None = None
    _mean: CostModel | None = None
    # Total evictions applied, by group id, because reports repeat the latest evictions.
    _evicted_totals: dict[str, int] = field(default_factory=dict)

    def add(self, load: GroupLoad) -> None:
        """Add a group with an empty cache."""
        self.index.join(load.group.group_id, load.capacity_blocks)
        self._corrections[load.group.group_id] = HitCorrection()
        self._evicted_totals[load.group.group_id] = 0
        self.note_group(load)

    def note_group(self, load: GroupLoad) -> None:
        """Note the cost model and the role of a group, which may have changed."""
        self.roles.note(load)
        self._pooled = self._mean = None
        if load.group.cost_model is None:
            self._costs.pop(load.group.group_id, None)
        else:
            self._costs[load.group.group_id] = load.group.cost_model

    def remove(self, group_id: str) -> None:
        """Remove a group."""
        self.index.leave(group_id)
        self.roles.remove(group_id)
        self._costs.pop(group_id, None)
        self._pooled = self._mean = None
        del self._corrections[group_id]
        del self._evicted_totals[group_id]

    def note_load(self, load: GroupLoad, reported: Load) -> None:
        """Apply the capacity and the hit totals of a group's latest report."""
        group_id = load.group.group_id
        self.index.resize(group_id, load.capacity_blocks + reported.host_blocks_total)
        self._corrections[group_id].note_reported(
            reported.prefix_queries_total, reported.prefix_hits_total
        )

    def note_evicted(self, load: GroupLoad, report: LoadReport) -> None:
        """Remove the hashes that a report lists as evicted, also if it arrives out of order.

        An eviction that an earlier report listed is ignored, since the block may be cached again.
        """
        group_id, evicted = load.group.group_id, report.dropped_prefixes
        if report.dropped_total:
            new = max(0, report.dropped_total - self._evicted_totals[group_id])
            evicted = evicted[-new:] if new else ()
            self._evicted_totals[group_id] += new
        self.index.remove_hashes(group_id, evicted)

    def hit_tokens(self, load: GroupLoad, ask: Ask) -> int:
        """Predicted cache hits of a prompt in a group; its last token is always computed."""
        factor = self._corrections[load.group.group_id].factor
        return min(ask.prompt_tokens - 1, int(factor * self._matched_tokens(load, ask)))

    def pick(
        self,
        groups: GroupIndex,
        ask: Ask,
        now_s: float,
        below_tokens: float = inf,
        avoided: frozenset[str] = NO_ADDRESSES,
    ) -> GroupLoad | None:
        """The group that should run a request, or None if none can start it now.

        The best-scored group among those with the lowest predicted TTFT, ties included. Of groups
        with equal scores, requests with the same `affinity` get the same.
        `below_tokens` and `avoided` as in `GroupIndex.pick`.
        """
        arguments = ask.prompt_tokens, ask.max_tokens, now_s, below_tokens, avoided
        candidates = {
            load.group.group_id: load for load in groups.best(*arguments, limit=CANDIDATES)
        }
        # If there are fewer, `best` has returned every group that can start the request.
        if len(candidates) == CANDIDATES:
            for group_id in self._longest_matches(groups, ask, arguments):
                candidates[group_id] = groups.loads[group_id]
        if self.roles.active and candidates:
            for load in self._by_role(groups, ask, arguments):
                candidates[load.group.group_id] = load
        steady = [load for load in candidates.values() if not load.flaps] or list(
            candidates.values()
        )
        if len(steady) < 2:
            return steady[0] if steady else None
        has_target = self.target(groups, ask, now_s) is not None
        ttft_s = {load.group.group_id: self.ttft_s(load, ask, has_target) for load in steady}
        latest_s = min(ttft_s.values()) * (1 + TTFT_TIE)
        early = [load for load in steady if ttft_s[load.group.group_id] <= latest_s]
        return min(early, key=lambda load: (groups.score(load), _rank(load, ask.affinity)))

    def target(self, groups: GroupIndex, ask: Ask, now_s: float) -> GroupLoad | None:
        """The decode group to which a request can be handed over; None if there is none.

        The next turn of a chat runs at once where the last one ended, if most of it is cached
        there: other groups lack the KV of the answer, whose hashes are unknown here.
        """
        home = self.roles.home(ask.prefix)
        if home is not None and 2 * self._matched_tokens(home, ask) >= ask.prompt_tokens:
            return None
        return self.roles.target(groups, ask, now_s)

    def note_moved(self, group_id: str, prefix: ThinHashes) -> None:
        """Note that a request was handed over to a group, with the KV of its prompt."""
        self.index.insert(group_id, prefix)
        self.roles.note_moved(group_id, prefix)

    def assign(self, load: GroupLoad, ask: Ask) -> int:
        """Record a dispatch to a group; returns the predicted number of tokens to compute."""
        group_id = load.group.group_id
        computed = ask.prompt_tokens - self.hit_tokens(load, ask)
        matched = min(ask.prompt_tokens - 1, self._matched_tokens(load, ask))
        # Workers leave resumed requests out of their totals, so the predicted rate must as well.
        if not ask.resumed:
            self._corrections[group_id].note_sent(ask.prompt_tokens, matched)
        self.index.insert(group_id, ask.prefix)
        return computed

    def check_invariants(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        self.index.check_invariants()

    def _longest_matches(self, groups: GroupIndex, ask: Ask, arguments: PickArguments) -> list[str]:
        """Ids of groups that can start the request, the longest match first."""
        matching = islice(self.index.by_longest_match(ask.prefix), MATCHES_EXAMINED)
        able = (name for name in matching if groups.can_start(groups.loads[name], *arguments))
        return list(islice(able, CANDIDATES))

    def _matched_tokens(self, load: GroupLoad, ask: Ask) -> int:
        blocks = self.index.matched_blocks(load.group.group_id, ask.prefix)
        return blocks * load.group.block_size

    def _by_role(
        self, groups: GroupIndex, ask: Ask, arguments: PickArguments
    ) -> Iterator[GroupLoad]:
        """Further candidates: the best-scored groups of each role, and busy prefill groups."""
        for role in (Role.PREFILL, Role.DECODE):
            yield from groups.best(*arguments, limit=CANDIDATES, role=role)
        yield from self.roles.busy(ask, *arguments[2:])

    def ttft_s(self, load: GroupLoad, ask: Ask, has_target: bool = False) -> float:
        """Predicted seconds until the first token of a request at a group, as dispatch counts them.

        `has_target`: a decode group could take the request over.
        """
        hit_tokens = self.hit_tokens(load, ask)
        costs = self.costs(load)
        ttft_s = predicted_ttft_s(costs, load, ask.prompt_tokens, hit_tokens)
        ttft_s += self.roles.penalty_s(costs, load, ask, hit_tokens, has_target)
        # NaN would compare as neither early nor late.
        return ttft_s if isfinite(ttft_s) else inf

    def costs(self, load: GroupLoad) -> CostModel:
        """The cost model of a group; if it is unknown, the mean of the others.

        Groups with the same device share the mean of what they have learned. Otherwise the noise
        in it would decide between equal groups, for as long as they keep it.
        """
        if self._pooled is None:
            self._pooled = pooled_models(self._costs)
        return self._pooled.get(load.group.group_id) or self._typical_costs

    @property
    def _typical_costs(self) -> CostModel:
        if not self._costs:
            return self.cost
        if self._mean is None:
            self._mean = mean_model(tuple(self._costs.values()))
        return self._mean
