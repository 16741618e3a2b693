"""`rebalance`: moves of requests away from a worker whose KV cache they outgrow.

Streams start at both workers; then all of the second move to the first, as if the second had just
started. Figures per value of the option `rebalance` without merges (`recompute`): preemptions,
output tokens per second and the median time per output token (TPOT). The same streams without that
move (`even`) show what rebalancing costs where nothing is uneven. With `drop`, the number of merges
is compared: none may happen where a move is enough. All systems take turns, paced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlencode

from benchmarks.faults.cluster import WHOLE_TIMEOUT_S, FaultCluster, await_true, running_cluster
from benchmarks.faults.load import Shape, Streams
from benchmarks.faults.outcomes import StreamOutcome
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.stats import distribution, quotient
from benchmarks.systems.system import Deployment, Say
from services.common.clock import monotonic_s
from tideserve.cli.client import AdminClient
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.move import PATH as MOVE_PATH
from tideserve.cli.tiny_model import LARGE_KV

QUICK_ROUNDS, FULL_ROUNDS = 2, 5
PACE = "A100-14B:2"
PROMPT_TOKENS, OUTPUT_TOKENS = (48, 80), (230, 270)
UNEVEN_SHARE, EVEN_SHARE = 1.4, 1.0
"""KV of all streams at their ends, over the KV cache of a worker."""
MOVE_TIMEOUT_S = 60.0
PREEMPTIONS_RATIO_MAX, SPEED_RATIO_MIN = 0.5, 0.95
RECEIVED = "tideserve_worker_received_requests_total"
MODES = ("off", "stuck", "all")
SYSTEMS: Mapping[str, tuple[str, str]] = {
    **{mode: ("recompute", mode) for mode in MODES},
    "drop-off": ("drop", "off"),
    "drop-stuck": ("drop", "stuck"),
}
"""Overload policy and `rebalance` by name."""


@dataclass(slots=True)
class ServedLoad:
    """Streams that have ended, `gap_max_s`: the longest time between two tokens of each."""

    preemptions: int
    moved: int  # by rebalancing
    merges: int
    tokens_per_s: float
    tpot_s: dict[str, float | None]
    gap_max_s: dict[str, float | None]
    failures: list[str] = field(default_factory=list)


def options_of(name: str) -> dict[str, Any]:
    """Options of `tideserve up` of a system."""
    policy, mode = SYSTEMS[name]
    return {"overload_policy": policy, "memmgr": {"rebalance": mode}}


def serve(cluster: FaultCluster, deployment: Deployment, seed: int, uneven: bool) -> ServedLoad:
    """Run the streams in a cluster. Raises SystemUnavailable."""
    capacity = cluster.kv_bytes_per_worker() // deployment.kv_bytes_per_token
    share = UNEVEN_SHARE if uneven else EVEN_SHARE
    count = round(share * capacity / (sum(PROMPT_TOKENS + OUTPUT_TOKENS) / 2))
    shape = Shape(count, PROMPT_TOKENS, OUTPUT_TOKENS, seed=seed)
    requests = [shape.request(number) for number in range(count)]
    streams = Streams(cluster.url, cluster.model, requests, f"{seed}/{uneven}")
    began_s = monotonic_s()
    preempted = cluster.counters().preemptions or 0
    streams.start()
    if uneven:
        if not await_true(lambda: streams.begun + streams.ended >= count, WHOLE_TIMEOUT_S):
            raise SystemUnavailable(f"only {streams.begun} of {count} streams have begun")
        first, second, *_ = cluster.workers
        gather(cluster, second, first)
    received = cluster.metrics().get(RECEIVED, 0.0)
    outcomes = streams.wait()
    seconds = monotonic_s() - began_s
    decisions = cluster.status()["decisions"]
    return ServedLoad(
        (cluster.counters().preemptions or 0) - preempted,
        int(cluster.metrics().get(RECEIVED, 0.0) - received),
        sum(decision["action"] == "merge" for decision in decisions),
        sum(outcome.completion_tokens for outcome in outcomes) / seconds,
        distribution([tpot_s for outcome in outcomes if (tpot_s := _tpot_s(outcome)) is not None]),
        distribution([max(_gaps_s(outcome), default=0.0) for outcome in outcomes]),
        [outcome.failure for outcome in outcomes if outcome.failure],
    )


def gather(cluster: FaultCluster, source: str, target: str) -> None:
    """Move all requests of a worker to another. Raises SystemUnavailable."""
    query = urlencode({"source": source, "target": target})
    with AdminClient(cluster.admin_url, None, MOVE_TIMEOUT_S) as client:
        answer = client.post_json(f"{MOVE_PATH}?{query}", {})
    if not answer["moved"]:
        raise SystemUnavailable(f"no request moved from {source}: {answer['reason']}")


def _gaps_s(outcome: StreamOutcome) -> list[float]:
    return [later - earlier for earlier, later in pairwise(outcome.times_s)]


def _tpot_s(outcome: StreamOutcome) -> float | None:
    gaps_s = _gaps_s(outcome)
    return sum(gaps_s) / len(gaps_s) if gaps_s else None


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Let the systems take turns, each in its own cluster, then judge."""
    deployment = replace(deployment, workers=2, paced=deployment.paced or PACE)
    uneven: dict[str, list[ServedLoad]] = {name: [] for name in SYSTEMS}
    even: dict[str, list[ServedLoad]] = {name: [] for name in MODES}
    rounds = QUICK_ROUNDS if choice.quick else FULL_ROUNDS
    for number in range(rounds):
        seed = choice.seed * 1000 + number
        for name in SYSTEMS:
            doing = partial(_say_with, progress, f"round {number + 1} of {rounds}, {name}: ")
            with running_cluster(deployment, 2, options_of(name), say) as cluster:
                if name in even:
                    doing("streams at both workers")
                    even[name].append(serve(cluster, deployment, seed, uneven=False))
                doing("streams at one worker")
                uneven[name].append(serve(cluster, deployment, seed, uneven=True))
    return judge(uneven, even, deployment)


def judge(
    uneven: Mapping[str, Sequence[ServedLoad]],
    even: Mapping[str, Sequence[ServedLoad]],
    deployment: Deployment,
) -> TrialVerdict:
    """Figures by system, and a problem for every missed bar."""
    preempted = {name: sum(turn.preemptions for turn in of) for name, of in uneven.items()}
    speeds = {name: median(turn.tokens_per_s for turn in of) for name, of in even.items()}
    tpots = {name: _median_tpot(of) for name, of in even.items()}
    figures: dict[str, Any] = {
        "workers": deployment.workers,
        "paced": deployment.paced,
        "preemptions": preempted,
        "throughput_tokens_per_s": {
            name: median(turn.tokens_per_s for turn in of) for name, of in uneven.items()
        },
        "tpot_p50_s": {name: _median_tpot(of) for name, of in uneven.items()},
        "moved": {name: sum(turn.moved for turn in of) for name, of in uneven.items()},
        "merges": {name: sum(turn.merges for turn in of) for name, of in uneven.items()},
        "even": {"throughput_tokens_per_s": speeds, "tpot_p50_s": tpots},
        "turns": {name: [asdict(turn) for turn in of] for name, of in uneven.items()},
        "turns_even": {name: [asdict(turn) for turn in of] for name, of in even.items()},
    }
    problems = [
        f"{name}: {len(turn.failures)} requests failed, the first: {turn.failures[0]}"
        for name, of in [*uneven.items(), *even.items()]
        for turn in of
        if turn.failures
    ]
    if not preempted["off"]:
        problems.append("no request was preempted without moves; take less memory")
    for mode in MODES[1:]:
        if preempted[mode] > PREEMPTIONS_RATIO_MAX * preempted["off"]:
            problems.append(f"{mode}: {preempted[mode]} preemptions against {preempted['off']}")
        if speeds[mode] < SPEED_RATIO_MIN * speeds["off"]:
            problems.append(f"{mode}: throughput {speeds[mode]:.0f} against {speeds['off']:.0f}/s")
        ratio = quotient(tpots["off"], tpots[mode])
        if ratio is None or ratio < SPEED_RATIO_MIN:
            problems.append(f"{mode}: the median time per token of even load is 1/{ratio} × off's")
    if figures["merges"]["drop-stuck"]:
        problems.append(f"{figures['merges']['drop-stuck']} merges though moves are enough")
    figures["problems"] = problems
    return TrialVerdict(figures, _rows(figures), problems)


def _median_tpot(turns: Sequence[ServedLoad]) -> float | None:
    known = [turn.tpot_s["p50"] for turn in turns if turn.tpot_s["p50"] is not None]
    return median(known) if known else None


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("paced to", str(figures["paced"]))]
    for name in SYSTEMS:
        tpot_s = figures["tpot_p50_s"][name]
        rows.append(
            (
                name,
                f"{figures['preemptions'][name]} preemptions, {figures['moved'][name]} requests"
                f" moved, {figures['merges'][name]} merges;"
                f" {figures['throughput_tokens_per_s'][name]:.0f} tokens/s, TPOT p50"
                f" {'–' if tpot_s is None else f'{tpot_s:.4f} s'}",
            )
        )
    even = figures["even"]
    for name in MODES:
        tpot_s = even["tpot_p50_s"][name]
        rows.append(
            (
                f"{name}, even load",
                f"{even['throughput_tokens_per_s'][name]:.0f} tokens/s, TPOT p50"
                f" {'–' if tpot_s is None else f'{tpot_s:.4f} s'}",
            )
        )
    return rows


def _say_with(say: Say, label: str, text: str) -> None:
    say(label + text)


SCENARIO = Scenario(
    name="rebalance",
    memory="36MiB",
    run=run,
    options=frozenset({"paced"}),
    tiny_model=LARGE_KV,
)
