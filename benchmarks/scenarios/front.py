"""`front`: cost of tideserve in front of vLLM, and the gain of its dispatch.

Both sides run the same vLLM with the same model, KV cache and threads: plain vLLM servers, and
workers of a cluster with `engine: vllm`. First, a single engine each, in pairs: a single request at
a time for TTFT, then eight concurrent requests for CPU time per token, summed by the kernel over
all processes. Then two engines each: requests of a trace of code completions, with their lengths
and with equal lengths, sent round-robin by the client to two plain servers and through a gateway.
They arrive by a Poisson process: the bursts of the trace would keep both engines busy whatever the
dispatch. Plain servers are suspended while the cluster is measured.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client_process import run_answered
from benchmarks.scenarios.scenario import FASTEST, LoadChoice, Scenario, TrialVerdict
from benchmarks.stats import percentiles
from benchmarks.systems.process_cost import ProcessCost
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from benchmarks.systems.vllm import BLOCK_TOKENS, Vllm
from tideserve.load.client import Job
from tideserve.load.record import SentRequest
from tideserve.load.traces import AZURE_CODE, load_trace
from tideserve.load.workload import LengthScale, Workload, fixed, from_trace

FRONT, PLAIN = "tideserve", "vllm"
PAIRS, QUICK_PAIRS = 10, 5
ALONE = (12, 1, 64, 8)
"""(requests, concurrency, prompt tokens, output tokens)."""
TOGETHER = (24, 8, 64, 64)
AZURE_CODE_BEGIN_S, AZURE_CODE_S = 250.0, 50.0
"""Part of the slice: 187 requests."""
ROUNDS, QUICK_ROUNDS = 5, 3
LENGTHS = {
    "lengths of the trace": LengthScale(0.2, 1.0, (16, 1024), (4, 64)),
    "equal lengths": LengthScale(prompt_range=(384, 384), output_range=(16, 16)),
}
"""Prompts are scaled to a fifth, so that a core prefills a prompt in a fraction of a second."""
UTILISATION = 0.75
"""Arrival rate as a share of the saturated throughput of the plain servers."""
SATURATING = 16
"""Concurrency that saturates the servers."""
ROUND_TIMEOUT_S = 300.0
CPU_SHARE_MAX, TTFT_ADDED_MAX_S = 0.05, 0.010
P99_SHARE_MAX = {"lengths of the trace": 0.8, "equal lengths": 1.05}


@dataclass(frozen=True, slots=True)
class LoadCost:
    """A load on a system: CPU seconds, output tokens, and the median TTFT in seconds."""

    cost: ProcessCost
    tokens: int
    ttft_s: float


@dataclass(slots=True)
class FrontRecord:
    """All measurements by system; TTFTs of a trace by lengths, then by system."""

    alone: dict[str, list[LoadCost]] = field(default_factory=lambda: {FRONT: [], PLAIN: []})
    together: dict[str, list[LoadCost]] = field(default_factory=lambda: {FRONT: [], PLAIN: []})
    ttfts_s: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    rates_per_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Sides:
    """The cluster and the plain servers, with the same number of single-thread engines."""

    systems: dict[str, Tideserve | Vllm]

    @classmethod
    def start(cls, deployment: Deployment, engines: int, say: Say, stack: ExitStack) -> "Sides":
        """Start both sides; `stack` stops them."""
        own = {"engine": "vllm", "threads": 1, "block_size": BLOCK_TOKENS}
        options = dict(deployment.options) | own
        alike = replace(deployment, workers=engines, cores=deployment.cores[:engines])
        front = Tideserve(FRONT, (), replace(alike, options=options))
        stack.callback(front.stop)
        front.start(say)
        plain = Vllm(PLAIN, (), replace(alike, kv_bytes=front.kv_bytes_per_worker()))
        stack.callback(plain.stop)
        plain.start(say)
        return cls({FRONT: front, PLAIN: plain})

    def send(self, name: str, load: Workload, concurrency: int | None) -> Sequence[SentRequest]:
        """The records of a load on a system, while the other system is idle."""
        system, plain = self.systems[name], self.systems[PLAIN]
        if system is plain:
            plain.wake()
        else:
            plain.rest()
        urls = tuple(system.urls)
        return run_answered(Job(urls, system.model, load.requests, ROUND_TIMEOUT_S, concurrency))

    def measure(self, name: str, shape: tuple[int, int, int, int], seed: int) -> LoadCost:
        """Send a closed loop and read its cost."""
        count, concurrency, prompt, outputs = shape
        load = fixed(count, prompt, outputs, seed, f"{name} {shape}")
        before = self.systems[name].process_cost()
        records = self.send(name, load, concurrency)
        cost = self.systems[name].process_cost().since(before)
        return LoadCost(cost, count * outputs, median(_ttfts(records)))


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start a single engine per side, then two, and measure."""
    record = FrontRecord()
    with ExitStack() as stack:
        compare_costs(Sides.start(deployment, 1, say, stack), record, choice, progress)
    with ExitStack() as stack:
        compare_dispatch(Sides.start(deployment, 2, say, stack), record, choice, progress)
    return judge(record)


def compare_costs(sides: Sides, record: FrontRecord, choice: LoadChoice, progress: Say) -> None:
    """Measure pairs of both closed loops; the systems alternate in going first."""
    pairs = QUICK_PAIRS if choice.quick else PAIRS
    for number in range(-1, pairs):  # pair -1 warms up
        progress(f"pair {number + 1} of {pairs}")
        for name in sorted((FRONT, PLAIN), reverse=bool(number % 2)):
            seed = choice.seed * 1000 + number
            alone, together = (sides.measure(name, shape, seed) for shape in (ALONE, TOGETHER))
            if number >= 0:
                record.alone[name].append(alone)
                record.together[name].append(together)


def compare_dispatch(sides: Sides, record: FrontRecord, choice: LoadChoice, progress: Say) -> None:
    """Measure rounds with both kinds of lengths; in a round, both systems get the same arrivals.

    Both systems get the load that determines the rate, so that neither starts cold. Prompts of the
    two kinds share no prefixes, which vLLM's prefix cache would skip.
    """
    rounds = QUICK_ROUNDS if choice.quick else ROUNDS
    trace = load_trace(AZURE_CODE if choice.trace is None else Path(choice.trace))
    recorded = trace.slice(AZURE_CODE_BEGIN_S, AZURE_CODE_S)
    for number, (lengths, scale) in enumerate(LENGTHS.items()):
        first_seed = (choice.seed * len(LENGTHS) + number) * 1000
        by = record.ttfts_s[lengths] = {FRONT: [], PLAIN: []}
        progress(f"{lengths}: measuring the saturated request rate")
        load = from_trace(recorded, scale, first_seed, lengths)
        answered = {name: _answered_per_s(sides.send(name, load, SATURATING)) for name in by}
        rate = record.rates_per_s[lengths] = UTILISATION * answered[PLAIN]
        for turn in range(rounds):
            progress(f"{lengths}: round {turn + 1} of {rounds}")
            seed = first_seed + 1 + turn
            load = from_trace(recorded.with_poisson_arrivals(rate, seed), scale, seed, lengths)
            # Alternate the order, so that drift of the machine affects both systems.
            for name in sorted(by, reverse=bool(turn % 2)):
                by[name].append(_ttfts(sides.send(name, load, None)))


def judge(record: FrontRecord) -> TrialVerdict:
    """Figures, and a problem per exceeded bound."""
    problems: list[str] = []
    figures: dict[str, Any] = {}
    rows: list[tuple[str, str]] = []
    for load, by in (("one at a time", record.alone), ("eight at a time", record.together)):
        # Compare within pairs, so that drift of the machine cancels out.
        added_s = [a.ttft_s - b.ttft_s for a, b in zip(by[FRONT], by[PLAIN], strict=True)]
        beside = [load_cost.cost.total_s / load_cost.cost.engine_s - 1 for load_cost in by[FRONT]]
        whole = [
            (a.cost.total_s / a.tokens) / (b.cost.total_s / b.tokens)
            for a, b in zip(by[FRONT], by[PLAIN], strict=True)
        ]
        figures[load] = {
            "ttft_added_s": added_s,
            "ttft_s": {name: [load_cost.ttft_s for load_cost in each] for name, each in by.items()},
            "cpu_s_per_1000_tokens": {
                name: [1e3 * load_cost.cost.total_s / load_cost.tokens for load_cost in each]
                for name, each in by.items()
            },
            "cpu_s": {
                name: [load_cost.cost.seconds for load_cost in each] for name, each in by.items()
            },
            "cpu_beside_engine": beside,
            "cpu_over_plain": whole,
        }
        added_ms = 1e3 * median(added_s)
        text = (
            f"median TTFT {added_ms:+.1f} ms; control plane {100 * median(beside):.1f} % of the"
            f" engine's CPU time; all processes {median(whole):.2f} x those of the plain server"
        )
        rows.append((load, text))
        if median(added_s) > TTFT_ADDED_MAX_S:
            problems.append(f"{load}: the median TTFT is {added_ms:.1f} ms longer")
    share = median(figures["eight at a time"]["cpu_beside_engine"])
    if share > CPU_SHARE_MAX:
        problems.append(f"the control plane takes {100 * share:.1f} % of the engine's CPU")
    for lengths in record.ttfts_s:
        _judge_dispatch(record, lengths, figures, rows, problems)
    return TrialVerdict(figures, rows, problems)


def _judge_dispatch(
    record: FrontRecord,
    lengths: str,
    figures: dict[str, Any],
    rows: list[tuple[str, str]],
    problems: list[str],
) -> None:
    """Add figures, rows and problems of the dispatch with one kind of lengths."""
    ttfts = record.ttfts_s[lengths]
    p99s = {name: [_p99(ttfts_s) for ttfts_s in each] for name, each in ttfts.items()}
    ratios = [a / b for a, b in zip(p99s[FRONT], p99s[PLAIN], strict=True)]
    # Judge the P99 over all rounds: a single round has too few requests for a stable P99.
    together = {name: _p99([*chain.from_iterable(each)]) for name, each in ttfts.items()}
    ratio = together[FRONT] / together[PLAIN]
    figures[lengths] = {
        "requests_per_s": record.rates_per_s[lengths],
        "requests": [len(ttfts_s) for ttfts_s in ttfts[FRONT]],
        "ttft_s": {
            name: [percentiles(ttfts_s) for ttfts_s in each] for name, each in ttfts.items()
        },
        "p99_ratios": ratios,
        "p99_s": together,
        "p99_ratio": ratio,
    }
    pooled = ", ".join(f"{p99_s:.2f} s {name}" for name, p99_s in together.items())
    rounds = ", ".join(f"{round_ratio:.2f}" for round_ratio in ratios)
    rate = f"{record.rates_per_s[lengths]:.1f} requests/s"
    rows.append((lengths, f"{rate}: P99 TTFT of all rounds {pooled}: {ratio:.2f} x ({rounds})"))
    if ratio > P99_SHARE_MAX[lengths]:
        problems.append(f"{lengths}: P99 TTFT is {ratio:.2f} x that of round-robin")


def _ttfts(records: Sequence[SentRequest]) -> list[float]:
    return [record.ttft_s for record in records]


def _p99(values: Sequence[float]) -> float:
    return percentiles(values)["p99"] or 0.0


def _answered_per_s(records: Sequence[SentRequest]) -> float:
    last_s = max(record.token_times_s[-1] for record in records)
    return len(records) / (last_s - min(record.sent_s for record in records))


SCENARIO = Scenario(
    name="front",
    memory="1GiB",
    run=run,
    options=frozenset({"trace"}),
    dtype=FASTEST,
)
