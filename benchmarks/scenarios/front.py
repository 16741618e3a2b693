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
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client_process import run_answered
from benchmarks.dispatch_rounds import DispatchRecord, DispatchRounds
from benchmarks.scenarios.scenario import FASTEST, LoadChoice, Scenario, TrialVerdict
from benchmarks.systems.process_cost import ProcessCost
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from benchmarks.systems.vllm import BLOCK_TOKENS, Vllm
from tideserve.load.client import Job
from tideserve.load.record import SentRequest
from tideserve.load.traces import AZURE_CODE, load_trace
from tideserve.load.workload import LengthScale, Workload, fixed

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
ROUND_TIMEOUT_S = 300.0
CPU_SHARE_MAX, TTFT_ADDED_MAX_S = 0.05, 0.010
DISPATCH = DispatchRounds(
    FRONT, PLAIN, LENGTHS, {"lengths of the trace": 0.8, "equal lengths": 1.05}
)


@dataclass(frozen=True, slots=True)
class LoadCost:
    """A load on a system: CPU seconds, output tokens, and the median TTFT in seconds."""

    cost: ProcessCost
    tokens: int
    ttft_s: float


@dataclass(slots=True)
class FrontRecord:
    """All measurements by system."""

    alone: dict[str, list[LoadCost]] = field(default_factory=lambda: {FRONT: [], PLAIN: []})
    together: dict[str, list[LoadCost]] = field(default_factory=lambda: {FRONT: [], PLAIN: []})
    dispatch: DispatchRecord = field(default_factory=DispatchRecord)


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
        sides = Sides.start(deployment, 2, say, stack)
        trace = load_trace(AZURE_CODE if choice.trace is None else Path(choice.trace))
        recorded = trace.slice(AZURE_CODE_BEGIN_S, AZURE_CODE_S)
        rounds = QUICK_ROUNDS if choice.quick else ROUNDS
        record.dispatch = DISPATCH.measure(sides.send, recorded, rounds, choice.seed, progress)
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
    dispatched, lengths_rows, lengths_problems = DISPATCH.judge(record.dispatch)
    return TrialVerdict(figures | dispatched, rows + lengths_rows, problems + lengths_problems)


def _ttfts(records: Sequence[SentRequest]) -> list[float]:
    return [record.ttft_s for record in records]


SCENARIO = Scenario(
    name="front",
    memory="1GiB",
    run=run,
    options=frozenset({"trace"}),
    dtype=FASTEST,
)
