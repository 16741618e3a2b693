"""Prefix-aware dispatch: the group with the lowest predicted TTFT.

A score of `dispatch` ranks groups whatever the request is. What a group has cached of a prompt
depends on the request; so few groups are compared for each: the best ones by that score, and those
that have most of the prompt.
"""

from dataclasses import dataclass, field
from itertools import islice
from math import inf

from services.core.ask import Ask
from services.core.cost.model import CostModel
from services.core.report import Load, LoadReport
from services.core.scheduler.dispatch import NOBODY
from services.core.scheduler.group_index import GroupIndex
from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.prefix_index import PrefixIndex

REMEMBERED = 32
"""Requests after which the rates so far count half."""
LEEWAY = 0.05
"""Added to both hit rates, so that small differences change little."""
SILENT_MAX = 64
"""Predicted hits after which a worker that reports no lookups is taken to have no prefix cache."""


@dataclass(slots=True)
class _Rate:
    """Cache hits per prompt token; newer requests count more."""

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
class HitTrust:
    """Corrects predicted cache hits by the two hit rates of a group: predicted, and reported.

    Rates instead of sums, since a worker looks prompts up some time after they were sent.
    """

    _predicted: _Rate = field(default_factory=_Rate)
    _told: _Rate = field(default_factory=_Rate)
    _totals: tuple[int, int] | None = None  # as the worker reported last
    _sent: int = 0
    _silent: int = 0  # predicted hits that were sent since the worker looked anything up

    @property
    def factor(self) -> float:
        """By how much to multiply a predicted hit, 0 to 1."""
        if self._silent >= SILENT_MAX:
            return 0.0
        if not self._told.tokens:
            return 1.0
        return min(1.0, (self._told.value + LEEWAY) / (self._predicted.value + LEEWAY))

    def note_sent(self, prompt_tokens: int, hit_tokens: int) -> None:
        """A prompt was sent there; the index has predicted these hits, before any correction."""
        self._predicted.add(prompt_tokens, hit_tokens)
        self._silent += hit_tokens > 0
        self._sent += 1
        if self._sent == REMEMBERED:
            self._sent = 0
            self._predicted.halve()
            self._told.halve()

    def note_told(self, queries_total: int, hits_total: int) -> None:
        """The worker has looked up so many prompt tokens since it started, so many were hits.

        The first totals are a base: they were before the requests that count here.
        """
        queries_before, hits_before = self._totals or (queries_total, hits_total)
        self._totals = queries_total, hits_total
        if queries_total > queries_before:
            self._silent = 0
            self._told.add(queries_total - queries_before, hits_total - hits_before)


CANDIDATES = 4
"""Groups compared: so many with the best score, and so many with the longest match."""
MATCHES_EXAMINED = 16
"""Groups with the longest match among which those with room are candidates."""
TTFT_TIE = 0.05
"""Predicted TTFTs that exceed the lowest by less than this share are ties."""


def predicted_ttft_s(
    cost: CostModel, load: GroupLoad, prompt_tokens: int, hit_tokens: int
) -> float:
    """Seconds until the first token of a prompt of which `hit_tokens` are cached in the group.

    Before it, the group computes what waits there: at what a token of this prompt would cost, on
    all members at once. In each of these iterations its running requests decode; batch ones that
    yield do not count.
    """
    new = prompt_tokens - hit_tokens
    waiting = load.tokens_ahead
    token_s = (cost.beyond_knee.chunk_s(0, prompt_tokens) - cost.lam) / prompt_tokens
    iterations = -(-(waiting + new) // load.group.max_batch_tokens)
    decodes_s = cost.decodes_alone_s(load.running, load.used_tokens)
    return cost.chunk_s(hit_tokens, new) + (
        waiting * token_s / load.group.members + iterations * decodes_s
    )


Wanted = tuple[int, int, float, float, frozenset[str]]
"""Arguments of `GroupIndex.best` and `GroupIndex.can_start`."""


@dataclass(slots=True)
class PrefixRanking:
    """The groups of one model: what they have cached, as far as the scheduler can know.

    Add a group and remove it as in `GroupIndex`.
    """

    cost: CostModel
    index: PrefixIndex = field(default_factory=PrefixIndex)
    _trust: dict[str, HitTrust] = field(default_factory=dict)
    _dropped_totals: dict[str, int] = field(default_factory=dict)  # of drops that were seen

    def add(self, load: GroupLoad) -> None:
        """A group comes: its cache is taken as empty."""
        self.index.join(load.group.group_id, load.capacity_blocks)
        self._trust[load.group.group_id] = HitTrust()
        self._dropped_totals[load.group.group_id] = 0

    def remove(self, group_id: str) -> None:
        """Forget a group."""
        self.index.leave(group_id)
        del self._trust[group_id]
        del self._dropped_totals[group_id]

    def note_load(self, load: GroupLoad, told: Load) -> None:
        """The group's load counts as told in the report just taken."""
        group_id = load.group.group_id
        self.index.resize(group_id, load.capacity_blocks)
        self._trust[group_id].note_told(told.prefix_queries_total, told.prefix_hits_total)

    def note_dropped(self, load: GroupLoad, report: LoadReport) -> None:
        """A report, in order or not, tells which blocks the group has dropped; each counts once.

        Told again, it may be cached there again.
        """
        group_id, dropped = load.group.group_id, report.dropped_prefixes
        if report.dropped_total:
            new = max(0, report.dropped_total - self._dropped_totals[group_id])
            dropped = dropped[-new:] if new else ()
            self._dropped_totals[group_id] += new
        self.index.drop(group_id, dropped)

    def hit_tokens(self, load: GroupLoad, ask: Ask) -> int:
        """Tokens of a prompt that need not be computed there; the last one always must."""
        factor = self._trust[load.group.group_id].factor
        return min(ask.prompt_tokens - 1, int(factor * self._matched_tokens(load, ask)))

    def pick(
        self,
        groups: GroupIndex,
        ask: Ask,
        now_s: float,
        below_tokens: float = inf,
        avoided: frozenset[str] = NOBODY,
    ) -> GroupLoad | None:
        """The group that is to take a request, or None if none can start it now.

        It is the one with the best score among those whose predicted TTFT is the lowest, or ties.
        `below_tokens` and `avoided` as in `GroupIndex.pick`.
        """
        wanted = ask.prompt_tokens, ask.max_tokens, now_s, below_tokens, avoided
        found = {load.group.group_id: load for load in groups.best(*wanted, most=CANDIDATES)}
        if len(found) == CANDIDATES:
            for group_id in self._longest(groups, ask, wanted):
                found[group_id] = groups.loads[group_id]
        steady = [load for load in found.values() if not load.flaps] or list(found.values())
        if len(steady) < 2:
            return steady[0] if steady else None
        ttft_s = {load.group.group_id: self._ttft_s(load, ask) for load in steady}
        latest_s = min(ttft_s.values()) * (1 + TTFT_TIE)
        early = [load for load in steady if ttft_s[load.group.group_id] <= latest_s]
        return min(early, key=lambda load: (groups.score(load), load.group.group_id))

    def assign(self, load: GroupLoad, ask: Ask) -> int:
        """A request goes to a group; returns how many tokens of it are probably computed there."""
        group_id = load.group.group_id
        computed = ask.prompt_tokens - self.hit_tokens(load, ask)
        matched = min(ask.prompt_tokens - 1, self._matched_tokens(load, ask))
        if not ask.resumed:  # a worker does not count the hits of a request that has run before
            self._trust[group_id].note_sent(ask.prompt_tokens, matched)
        self.index.fill(group_id, ask.prefix)
        return computed

    def check_invariants(self) -> None:
        """Raise AssertionError if the index contradicts itself."""
        self.index.check_invariants()

    def _longest(self, groups: GroupIndex, ask: Ask, wanted: Wanted) -> list[str]:
        """Some groups that can start the request, of those with the longest match."""
        matching = islice(self.index.longest(ask.prefix), MATCHES_EXAMINED)
        able = (one for one in matching if groups.can_start(groups.loads[one], *wanted))
        return list(islice(able, CANDIDATES))

    def _matched_tokens(self, load: GroupLoad, ask: Ask) -> int:
        blocks = self.index.matched_blocks(load.group.group_id, ask.prefix)
        return blocks * load.group.block_size

    def _ttft_s(self, load: GroupLoad, ask: Ask) -> float:
        hit_tokens = self.hit_tokens(load, ask)
        return predicted_ttft_s(self.cost, load, ask.prompt_tokens, hit_tokens)
