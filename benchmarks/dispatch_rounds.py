"""Compares the dispatch of two systems by P99 TTFT under the same Poisson arrivals.

One system is the gateway, the other are plain servers to which the client sends round-robin. Both
are first saturated, which determines the rate, so that neither starts cold.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from benchmarks.stats import percentiles
from benchmarks.systems.system import Say
from tideserve.load.record import SentRequest
from tideserve.load.traces import Trace
from tideserve.load.workload import LengthScale, Workload, from_trace

UTILISATION = 0.75
"""Arrival rate as a share of the saturated throughput of the plain servers."""
SATURATING = 16
"""Concurrency that saturates the servers."""
Send = Callable[[str, Workload, int | None], Sequence[SentRequest]]
"""Sends a load to the system of that name, with a concurrency or at the load's own times."""


@dataclass(slots=True)
class DispatchRecord:
    """TTFTs in seconds by lengths, then by system, then by round; the rates by lengths."""

    ttfts_s: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    rates_per_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DispatchRounds:
    """Rounds of a trace's requests on the systems `front` and `plain`.

    `p99_share_max`: largest P99 TTFT of `front` by lengths, as a multiple of that of `plain`.
    """

    front: str
    plain: str
    lengths: Mapping[str, LengthScale]
    p99_share_max: Mapping[str, float]

    def measure(
        self, send: Send, recorded: Trace, rounds: int, seed: int, progress: Say
    ) -> DispatchRecord:
        """Measure rounds with each kind of lengths; both systems get the same arrivals.

        Prompts of the kinds share no prefixes, which a prefix cache would skip.
        """
        record = DispatchRecord()
        for number, (lengths, scale) in enumerate(self.lengths.items()):
            first_seed = (seed * len(self.lengths) + number) * 1000
            by = record.ttfts_s[lengths] = {self.front: [], self.plain: []}
            progress(f"{lengths}: measuring the saturated request rate")
            load = from_trace(recorded, scale, first_seed, lengths)
            answered = {name: _answered_per_s(send(name, load, SATURATING)) for name in by}
            rate = record.rates_per_s[lengths] = UTILISATION * answered[self.plain]
            for turn in range(rounds):
                progress(f"{lengths}: round {turn + 1} of {rounds}")
                turn_seed = first_seed + 1 + turn
                arrivals = recorded.with_poisson_arrivals(rate, turn_seed)
                load = from_trace(arrivals, scale, turn_seed, lengths)
                # Alternate the order, so that drift of the machine affects both systems.
                for name in sorted(by, reverse=bool(turn % 2)):
                    by[name].append([sent.ttft_s for sent in send(name, load, None)])
        return record

    def judge(
        self, record: DispatchRecord
    ) -> tuple[dict[str, Any], list[tuple[str, str]], list[str]]:
        """Figures, rows and problems by lengths."""
        figures: dict[str, Any] = {}
        rows, problems = list[tuple[str, str]](), list[str]()
        for lengths, ttfts in record.ttfts_s.items():
            p99s = {name: [_p99(ttfts_s) for ttfts_s in each] for name, each in ttfts.items()}
            ratios = [a / b for a, b in zip(p99s[self.front], p99s[self.plain], strict=True)]
            # Judge the P99 over all rounds: a single round has too few requests for a stable P99.
            together = {name: _p99([*chain.from_iterable(each)]) for name, each in ttfts.items()}
            ratio = together[self.front] / together[self.plain]
            figures[lengths] = {
                "requests_per_s": record.rates_per_s[lengths],
                "requests": [len(ttfts_s) for ttfts_s in ttfts[self.front]],
                "ttft_s": {
                    name: [percentiles(ttfts_s) for ttfts_s in each] for name, each in ttfts.items()
                },
                "p99_ratios": ratios,
                "p99_s": together,
                "p99_ratio": ratio,
            }
            pooled = ", ".join(f"{p99_s:.2f} s {name}" for name, p99_s in together.items())
            by_round = ", ".join(f"{round_ratio:.2f}" for round_ratio in ratios)
            rate = f"{record.rates_per_s[lengths]:.1f} requests/s"
            text = f"{rate}: P99 TTFT of all rounds {pooled}: {ratio:.2f} x ({by_round})"
            rows.append((lengths, text))
            if ratio > self.p99_share_max[lengths]:
                problems.append(f"{lengths}: P99 TTFT is {ratio:.2f} x that of round-robin")
        return figures, rows, problems


def _p99(values: Sequence[float]) -> float:
    return percentiles(values)["p99"] or 0.0


def _answered_per_s(records: Sequence[SentRequest]) -> float:
    last_s = max(record.token_times_s[-1] for record in records)
    return len(records) / (last_s - min(record.sent_s for record in records))
