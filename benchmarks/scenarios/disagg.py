"""`disagg`: prompts and answers at different workers (`roles`), against mixed workers.

Two workers serve the lengths of two real traces: `prefill_heavy` (Azure's code completions) and
`decode_heavy` (Azure's conversations). Requests arrive at random; in both mixes, their prompts keep
one worker busy for 70 % of the time, which is what one prefill worker can serve. Requests have the
default targets of the class `interactive`, multiplied by the slowdown of the device.

`unchunked` computes each prompt in one iteration, during which answers pause. `mixed` has the
default settings: chunked prefill by deadline. `1+1` has `roles: prefill=1,decode=1`, and `auto` has
`roles: auto`; both hand prompts of at least 128 tokens over. All run at the same time and take
turns, paced, with links of 100 Gbit/s that are slowed down like the device. Then chats of two turns
measure how much of the first turn the second one finds in the prefix cache of `1+1`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.client_process import run_job
from benchmarks.faults.cluster import await_true, blocks_free
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.stats import distribution, quotient
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.schedulings import SCHEDULINGS, merged
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import BLOCK_TOKENS, Tideserve
from services.common.device_profile import load_profile, split_slowdown
from services.core.cost.model import CostModel
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.client import Job
from tideserve.load.event_stream import OpenAIServer, StreamedAnswer
from tideserve.load.record import RequestOutcome, SentRequest
from tideserve.load.traces import AZURE_CODE, AZURE_CONVERSATIONS, Trace, load_trace
from tideserve.load.workload import LengthScale, PlannedRequest, Workload, from_trace, prompt_ids
from tideserve.sim.report import percentile

PACE = "A100-14B:2"
LINK_GBITS = 100.0
PROMPTS_BUSY = 0.7
"""Share of the time of one worker that the prompts of a load take."""
TTFT_S, TPOT_S = 0.5, 0.1
"""The default targets of the class `interactive`."""
QUICK_S, FULL_S = 10.0, 60.0
QUICK_ROUNDS, FULL_ROUNDS = 3, 5
ROWS = 600
"""Rows of the trace from which a round draws its requests."""
REST_TIMEOUT_S, DRAIN_S = 60.0, 90.0
SCALE = LengthScale(0.5, 1.0, (32, 1800), (8, 160))
"""Fits the tiny model's 2,048 positions."""
MIXES: Mapping[str, Path] = {"prefill_heavy": AZURE_CODE, "decode_heavy": AZURE_CONVERSATIONS}
UNCHUNKED, MIXED, APART, AUTO = "unchunked", "mixed", "1+1", "auto"
ITERATION_MAX = 2048
"""Of all systems, as on GPUs: deadlines make the chunks of `mixed` shorter."""
HANDED = {"scheduler": {"hand_over_min_tokens": 128}}
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    UNCHUNKED: SCHEDULINGS["prefill-first"][1],
    MIXED: {},
    APART: {"roles": "prefill=1,decode=1", **HANDED},
    AUTO: {"roles": "auto", **HANDED},
}
CHATS, FIRST_TURN, ANSWER, SECOND_TURN = 8, 600, 48, 64
"""Chats of two turns: tokens of the first prompt, of an answer, and of what follows it."""
GAP_RATIO_MAX, AUTO_LOSS_MAX, CACHED_MIN = 0.6, 0.05, 0.9
HANDED_OVER = "tideserve_worker_handed_over_requests_total"
KEPT = "tideserve_worker_kept_hand_overs_total"
BLOCKS = "tideserve_worker_shipped_blocks_total"
SHIPPING = "tideserve_worker_shipping_seconds_total"
COUNTERS = (HANDED_OVER, KEPT, BLOCKS, SHIPPING)


@dataclass(slots=True)
class Turns:
    """The measured rounds of a system in a mix, and its hand-overs in them."""

    rounds: list[tuple[SentRequest, ...]] = field(default_factory=list)
    handed_over: int = 0
    kept: int = 0
    shipped_blocks: float = 0.0
    shipping_s: float = 0.0

    @property
    def records(self) -> list[SentRequest]:
        """The requests of all rounds."""
        return [record for records in self.rounds for record in records]


Measured = Mapping[str, Mapping[str, Turns]]
"""By mix, then by system."""


def rate_of(trace: Trace, costs: CostModel) -> float:
    """Requests per second whose prompts take `PROMPTS_BUSY` of one worker's time."""
    return PROMPTS_BUSY / fmean(costs.chunk_s(0, SCALE.prompt_tokens(row)) for row in trace.rows)


def workload_of(
    trace: Trace, rate_per_s: float, seconds: float, slowdown: float, seed: int
) -> Workload:
    """The requests of a round. Prompts share no prefixes, also across seeds."""
    first = seed * ROWS % max(1, len(trace.rows) - ROWS)
    part = replace(trace, rows=trace.rows[first : first + ROWS])
    arriving = part.with_poisson_arrivals(rate_per_s, seed).slice(0.0, seconds)
    made = from_trace(arriving, SCALE, seed, f"arrivals at random, {rate_per_s:.2f} per second")
    ttft_s, tpot_s = TTFT_S * slowdown, TPOT_S * slowdown
    requests = [
        replace(request, slo_class="interactive", ttft_s=ttft_s, tpot_s=tpot_s)
        for request in made.requests
    ]
    return replace(made, requests=tuple(requests))


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start all systems, let them take turns, then judge."""
    deployment = replace(deployment, workers=2, paced=deployment.paced or PACE)
    assert deployment.paced is not None
    slowdown = split_slowdown(deployment.paced)[1]
    costs = load_profile(deployment.paced).model
    seconds = choice.seconds or (QUICK_S if choice.quick else FULL_S)
    rounds = QUICK_ROUNDS if choice.quick else FULL_ROUNDS
    traces = {mix: load_trace(path) for mix, path in MIXES.items()}
    measured = {mix: {name: Turns() for name in SYSTEMS} for mix in MIXES}
    statements: dict[str, str] = {}
    with ExitStack() as stack:
        clusters = {name: _started(stack, name, deployment, slowdown, say) for name in SYSTEMS}
        for number in range(rounds):
            for mix, trace in traces.items():
                rate = rate_of(trace, costs)
                seed = choice.seed * 1000 + number
                load = workload_of(trace, rate, seconds, slowdown, seed)
                statements[mix] = load.statement
                for name, cluster in clusters.items():
                    progress(f"round {number + 1} of {rounds}, {mix}, {name}")
                    _measure(cluster, load, seconds, measured[mix][name])
        progress("chats of two turns")
        cached = second_turn_cached_share(clusters[APART], choice.seed)
    return judge(measured, cached, deployment, statements)


def _started(
    stack: ExitStack, name: str, deployment: Deployment, slowdown: float, say: Say
) -> Tideserve:
    common = {
        "max_batch_tokens": ITERATION_MAX,
        "worker": {"pace_links": LINK_GBITS / slowdown},
    }
    options = merged(merged(deployment.options, common), SYSTEMS[name])
    cluster = Tideserve(name, (), replace(deployment, options=options))
    stack.callback(cluster.stop)
    cluster.start(say)
    return cluster


def _measure(cluster: Tideserve, load: Workload, seconds: float, turns: Turns) -> None:
    """Send a load to the idle cluster. Raises SystemUnavailable."""
    if not await_true(lambda: blocks_free(read_status(cluster.admin_url)), REST_TIMEOUT_S):
        raise SystemUnavailable("requests of the last round have not ended")
    before = cluster.metrics()
    job = Job(tuple(cluster.urls), cluster.model, load.requests, timeout_s=seconds + DRAIN_S)
    turns.rounds.append(run_job(job, lambda _line: None))
    after = cluster.metrics()
    new = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in COUNTERS}
    turns.handed_over += int(new[HANDED_OVER])
    turns.kept += int(new[KEPT])
    turns.shipped_blocks += new[BLOCKS]
    turns.shipping_s += new[SHIPPING]


def second_turn_cached_share(cluster: Tideserve, seed: int) -> float | None:
    """Share of the first turns, prompts and answers, that the second turns find cached."""
    turns = asyncio.run(_chats(cluster.urls[0], cluster.model, seed))
    return quotient(sum(cached for cached, _ in turns), sum(known for _, known in turns))


async def _chats(url: str, model: str, seed: int) -> list[tuple[int, int]]:
    """For each chat: tokens that its second turn finds cached, and tokens of its first turn."""
    server = OpenAIServer(url, None)
    turns = []
    try:
        for number in range(CHATS):
            name = f"disagg chat {seed} {number}"
            first = prompt_ids(FIRST_TURN, name)
            answer = await _answer(server, model, first, number, name)
            known = (*first, *answer.output_ids)
            second = (*known, *prompt_ids(SECOND_TURN, f"{name} goes on"))
            again = await _answer(server, model, second, number, name)
            turns.append((again.cached_tokens, len(known)))
    finally:
        await server.close()
    return turns


async def _answer(
    server: OpenAIServer, model: str, prompt: tuple[int, ...], number: int, salt: str
) -> StreamedAnswer:
    request = PlannedRequest(0.0, prompt, ANSWER, number, cache_salt=salt)
    answer = StreamedAnswer()
    await server.complete(model, request, answer, lambda: None)
    if answer.error or not answer.finished:
        raise SystemUnavailable(f"a chat failed: {answer.error or answer.body}")
    return answer


def judge(
    measured: Measured,
    cached: float | None,
    deployment: Deployment,
    statements: Mapping[str, str],
) -> TrialVerdict:
    """Figures by mix and system, and a problem for every missed bar."""
    assert deployment.paced is not None
    slowdown = split_slowdown(deployment.paced)[1]
    mixes = {
        mix: {
            "workload": statements.get(mix, ""),
            "targets": {"ttft_s": TTFT_S * slowdown, "tpot_s": TPOT_S * slowdown},
            "systems": {name: system_figures(turns, slowdown) for name, turns in systems.items()},
        }
        for mix, systems in measured.items()
    }
    ratios = gap_ratios(measured["prefill_heavy"])
    problems = [*_failures(measured), *_missed(mixes, ratios, cached)]
    figures = {
        "paced": deployment.paced,
        "link_gbits": LINK_GBITS / slowdown,
        "workers": deployment.workers,
        "prompts_busy": PROMPTS_BUSY,
        "mixes": mixes,
        "gap_p99_ratios": ratios,
        "second_turn_cached_share": cached,
        "hand_over_link_share": link_share(measured, deployment.paced),
        "problems": problems,
    }
    return TrialVerdict(figures, _rows(figures), problems)


def system_figures(turns: Turns, slowdown: float) -> dict[str, Any]:
    """Latencies of a system over all rounds, and the share of requests within both targets."""
    records = turns.records
    completed = [record for record in records if record.outcome is RequestOutcome.COMPLETED]
    done = [record for record in completed if record.token_times_s]
    kept = [
        record
        for record in done
        if record.ttft_s <= TTFT_S * slowdown and (record.tpot_s or 0.0) <= TPOT_S * slowdown
    ]
    return {
        "requests": len(records),
        "completed": len(done),
        "ttft_s": distribution([record.ttft_s for record in done]),
        "tpot_s": distribution([record.tpot_s for record in done if record.tpot_s is not None]),
        "inter_token_s": distribution([gap for record in done for gap in record.inter_token_s]),
        "both_targets_share": quotient(len(kept), len(records)),
        "handed_over": turns.handed_over,
        "kept": turns.kept,
    }


def link_share(measured: Measured, paced: str) -> float | None:
    """Rate at which `1+1` sends KV while it sends any, as a share of the modelled link's."""
    turns = [systems[APART] for systems in measured.values()]
    token_bytes = load_profile(paced).kv_bytes_per_token
    if token_bytes is None:
        return None
    kv_bytes = sum(of.shipped_blocks for of in turns) * BLOCK_TOKENS * token_bytes
    link_bytes_s = LINK_GBITS * 1e9 / 8 / split_slowdown(paced)[1]
    return quotient(kv_bytes, sum(of.shipping_s for of in turns) * link_bytes_s)


def gap_ratios(systems: Mapping[str, Turns]) -> list[float]:
    """By round: P99 of the gaps between tokens of `1+1`, over that of `unchunked`."""
    pairs = zip(systems[APART].rounds, systems[UNCHUNKED].rounds, strict=True)
    both = [(_gap_p99(apart), _gap_p99(unchunked)) for apart, unchunked in pairs]
    ratios = [quotient(apart, unchunked) for apart, unchunked in both]
    return [ratio for ratio in ratios if ratio is not None]


def _gap_p99(records: Sequence[SentRequest]) -> float:
    return percentile([gap for record in records for gap in record.inter_token_s], 0.99) or 0.0


def _failures(measured: Measured) -> list[str]:
    return [
        f"{mix}, {name}: {len(failed)} requests failed, the first: {failed[0].error}"
        for mix, systems in measured.items()
        for name, turns in systems.items()
        if (failed := [r for r in turns.records if r.outcome is not RequestOutcome.COMPLETED])
    ]


def _missed(
    mixes: Mapping[str, Mapping[str, Any]], ratios: Sequence[float], cached: float | None
) -> list[str]:
    problems = []
    if not ratios or median(ratios) > GAP_RATIO_MAX:
        problems.append(
            f"prefill_heavy: P99 of the gaps of 1+1 over unchunked is {ratios}, not {GAP_RATIO_MAX}"
        )
    for mix, entry in mixes.items():
        shares = {name: of["both_targets_share"] or 0.0 for name, of in entry["systems"].items()}
        best = max(shares[MIXED], shares[APART])
        if shares[AUTO] < best - AUTO_LOSS_MAX:
            problems.append(f"{mix}: {shares[AUTO]:.3f} of auto keep both targets, not {best:.3f}")
    if cached is None or cached < CACHED_MIN:
        problems.append(f"second turns find {cached} of the first cached, not {CACHED_MIN}")
    return problems


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("paced to", f"{figures['paced']}, links of {figures['link_gbits']:g} Gbit/s")]
    for mix, entry in figures["mixes"].items():
        for name, of in entry["systems"].items():
            gap, ttft = of["inter_token_s"], of["ttft_s"]
            rows.append(
                (
                    f"{mix}, {name}",
                    f"P99 gap {_text(gap['p99'])} (P50 {_text(gap['p50'])}), P99 TTFT"
                    f" {_text(ttft['p99'])}, {of['both_targets_share'] or 0:.1%} in both targets,"
                    f" {of['handed_over']} handed over, {of['kept']} not",
                )
            )
    cached = figures["second_turn_cached_share"]
    rows.append(("second turns cached", "–" if cached is None else f"{cached:.1%}"))
    share = figures["hand_over_link_share"]
    rows.append(("KV is sent at", "–" if share is None else f"{share:.0%} of the link's rate"))
    return rows


def _text(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.3f} s"


SCENARIO = Scenario(
    name="disagg",
    memory="64MiB",
    run=run,
    options=frozenset({"paced", "seconds"}),
    tiny_model={"max_position_embeddings": ITERATION_MAX},
)
