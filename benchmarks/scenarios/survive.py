"""`survive`: a worker of four is killed, alone and in a merged group; etcd is suspended.

The setup follows published figures of other systems: 800 requests, 64 concurrently, and one of four
workers dies after a quarter of them. No request may fail, and the survivors must keep their share
of the throughput. A worker also dies in a merged group that serves 1.5 times the tokens that the
survivors' KV can hold: no request may fail, and the report compares the longest wait with the ideal
wait. Then etcd is suspended for a minute under a flood in a merged group, which must not change the
groups. Every answer is compared with its undisturbed answer, and the event logs are audited.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from benchmarks.audit_logs import Audited
from benchmarks.faults.cluster import (
    BY_HAND,
    POLL_S,
    WHOLE_TIMEOUT_S,
    FaultCluster,
    StableWatch,
    Status,
    alive_but,
    await_true,
    is_stable,
    running_cluster,
    serve_alone,
)
from benchmarks.faults.load import (
    Shape,
    SteadyLoad,
    Streams,
    stream_requests,
    undisturbed_answers,
)
from benchmarks.faults.outcomes import Undisturbed, request_rows
from benchmarks.faults.random_faults import RandomFault, strike
from benchmarks.faults.survival import Crowd, Loss, Outage
from benchmarks.scenarios.scenario import GPU, LoadChoice, Scenario, TrialVerdict
from benchmarks.systems.system import Deployment, Say
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.tiny_model import DEEP
from tideserve.load.workload import PlannedRequest

WORKERS_MIN = 4
AT_ONCE = 64
OUTPUT_TOKENS = (48, 80)
KILL_AFTER = 0.25
"""Share of the requests that have ended when the worker dies."""
DISTINCT = 64
"""Number of distinct requests of the flood, which repeat."""
CROWD_FACTOR = 1.5
"""KV of all requests at their ends, over the KV capacity of the survivors."""
CROWD_PROMPT_TOKENS, CROWD_OUTPUT_TOKENS = (500, 700), (280, 360)
FLOOD_BEFORE_S, FLOOD_AFTER_S = 3.0, 20.0


@dataclass(frozen=True, slots=True)
class Extent:
    """Number of requests when a worker dies, and duration of the etcd suspension."""

    requests: int
    outage_s: float


FULL, QUICK = Extent(800, 60.0), Extent(400, 15.0)
"""Both suspensions exceed a lease."""


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start a cluster with event logs, inject the faults, and audit the logs."""
    workers = max(deployment.workers, WORKERS_MIN)
    with running_cluster(deployment, workers, BY_HAND, say) as cluster:
        trouble = Trouble(cluster, workers, choice.seed, progress)
        extent = QUICK if choice.quick else FULL
        apart, merged = trouble.deaths(extent.requests)
        alone_tokens = cluster.kv_bytes_per_worker() // deployment.kv_bytes_per_token
        crowd = trouble.crowd((workers - 1) * alone_tokens)
        outage = trouble.outage(extent.outage_s)
        progress("replaying and auditing the event logs")
        parts: dict[str, Loss | Outage]
        parts = {"apart": apart, "merged": merged, "crowded": crowd, "etcd": outage}
        verdict = judge(parts, cluster.audit())
        cluster.keep_if(verdict.problems, "survive", say)
    return verdict


def judge(parts: Mapping[str, Loss | Outage], audited: Audited) -> TrialVerdict:
    """Figures, and a problem for every violated property."""
    problems = [f"{name}: {text}" for name, part in parts.items() for text in part.problems()]
    problems += audited.problems
    figures: dict[str, Any] = {name: part.figures() for name, part in parts.items()}
    rows = [
        (f"{part}: {row}", text)
        for part, part_figures in figures.items()
        for row, text in _part_rows(part_figures)
    ]
    figures |= audited.figures | {"problems": problems}
    return TrialVerdict(figures, [*rows, *audited.rows], problems)


class Trouble:
    """Injects faults into a cluster one at a time, each once all workers serve."""

    def __init__(self, cluster: FaultCluster, workers: int, seed: int, say: Say) -> None:
        self._cluster = cluster
        self._workers = workers
        self._seed = seed
        self._rng = Random(seed)
        self._say = say

    def deaths(self, count: int) -> tuple[Loss, Loss]:
        """Kill a worker of a single-worker group, then a worker of a merged group, under load."""
        requests = stream_requests(count, self._seed, OUTPUT_TOKENS)
        wanted = self._undisturbed(requests)

        def late(streams: Streams) -> bool:
            return streams.ended >= KILL_AFTER * count

        apart = self._kill_worker("apart", requests, wanted, AT_ONCE, late)
        self._merge()
        return apart, self._kill_worker("merged", requests, wanted, AT_ONCE, late)

    def crowd(self, survivors_tokens: int) -> Crowd:
        """Kill a worker once all requests run, whose KV exceeds that of the survivors."""
        mean = sum(CROWD_PROMPT_TOKENS + CROWD_OUTPUT_TOKENS) / 2
        count = math.ceil(CROWD_FACTOR * survivors_tokens / mean)
        requests = stream_requests(
            count, self._seed, CROWD_OUTPUT_TOKENS, prompt_tokens=CROWD_PROMPT_TOKENS
        )
        wanted = self._undisturbed(requests)
        self._merge()
        loss = self._kill_worker(
            "crowded", requests, wanted, count, lambda streams: streams.begun == count
        )
        prompts = [len(request.prompt_ids) for request in requests]
        demand_tokens = sum(prompts) + sum(request.output_tokens for request in requests)
        seen = {field_.name: getattr(loss, field_.name) for field_ in fields(loss)}
        return Crowd(
            **seen, prompts=prompts, demand_tokens=demand_tokens, survivors_tokens=survivors_tokens
        )

    def outage(self, stopped_s: float) -> Outage:
        """Suspend etcd under a flood in a merged group. Raises SystemUnavailable."""
        self._merge()
        cluster, outage = self._cluster, Outage(stopped_s)
        shape = Shape(
            *(AT_ONCE, (16, 96), OUTPUT_TOKENS),
            seed=self._seed,
            temperature=0.8,
            distinct=DISTINCT,
        )
        wanted = self._undisturbed([shape.request(number) for number in range(DISTINCT)])
        names = cluster.workers

        def settled(status: Status) -> bool:
            outage.note(status["groups"])
            return is_stable(status, names, alive_but(()))

        self._say(f"etcd: suspending it for {stopped_s:.0f} s during a flood")
        with SteadyLoad(cluster.url, cluster.model, shape, wanted) as load:
            time.sleep(FLOOD_BEFORE_S)
            # Watch through the outage, so that every change of the groups is noted.
            watch = StableWatch(lambda: cluster.holds(settled))
            try:
                strike(RandomFault("etcd", stops_s=stopped_s), {}, cluster.pids, self._rng)
                back_s = monotonic_s()
                time.sleep(FLOOD_AFTER_S)
            finally:
                since_s = watch.end()
        outage.settled_s = None if since_s is None else max(0.0, since_s - back_s)
        outage.tally = load.tally
        if not cluster.rests(WHOLE_TIMEOUT_S):
            raise SystemUnavailable("blocks are in use in an idle cluster")
        return outage

    def _undisturbed(self, requests: Sequence[PlannedRequest]) -> list[Undisturbed]:
        self._say("an undisturbed run")
        return undisturbed_answers(self._cluster.url, self._cluster.model, requests, AT_ONCE)

    def _merge(self) -> None:
        self._say("merging all groups")
        self._cluster.merge()

    def _kill_worker(
        self,
        name: str,
        requests: Sequence[PlannedRequest],
        wanted: Sequence[Undisturbed],
        at_once: int,
        dies: Callable[[Streams], bool],
    ) -> Loss:
        """Kill a worker once `dies` holds for the streams, and watch until all workers serve."""
        cluster = self._cluster
        self._say(f"{name}: {len(requests)} requests, {at_once} at a time")
        streams = Streams(cluster.url, cluster.model, requests, name, at_once)
        streams.start()
        while streams.running and not dies(streams):
            time.sleep(POLL_S)
        status = cluster.status()
        struck = strike(RandomFault("worker"), status, {}, self._rng)
        hit_s = monotonic_s()
        self._say(f"{name}: {struck.description}")
        pids = {str(row["id"]): set(row["pids"]) for row in status["workers"]}
        survivors = {worker for worker in pids if not pids[worker] & struck.killed}
        alive = alive_but(struck.killed)
        # The survivors may serve long before the killed worker is replaced.
        alone = StableWatch(lambda: cluster.holds(lambda now: serve_alone(now, survivors, alive)))
        whole = StableWatch(lambda: cluster.stable(pids, struck.killed))
        try:
            outcomes = streams.wait()
            self._say(f"{name}: waiting for all workers")
            await_true(lambda: cluster.stable(pids, struck.killed), WHOLE_TIMEOUT_S)
        finally:
            alone_s, whole_s = alone.end(), whole.end()
        return Loss(self._workers, at_once, hit_s, alone_s, whole_s, outcomes, wanted)


SHOWN = {
    "stopped_s": ("stood still for", "{:.1f} s"),
    "changes_of_groups": ("changes of groups", "{}"),
    "settled_after_s": ("all well after its return", "{:.1f} s"),
    "demand_tokens": ("KV of all requests", "{:,} tokens"),
    "survivors_tokens": ("KV of the survivors", "{:,} tokens"),
    "alone_after_s": ("survivors serve without it after", "{:.1f} s"),
    "whole_after_s": ("all workers serve after", "{:.1f} s"),
    "longest_silence_s": ("longest silence of a stream", "{:.1f} s"),
    "ideal_wait_s": ("wait that no order avoids", "{:.1f} s"),
    "share_alive": ("part of the workers that survives", "{:.0%}"),
    "throughput_ratio": ("throughput of that part, over that before", "{:.0%}"),
}
"""Labels and formats of the table rows, by figure."""


def _part_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = request_rows(figures["requests"])
    for name, (label, form) in SHOWN.items():
        if name in figures:
            rows.append((label, "–" if figures[name] is None else form.format(figures[name])))
    for when, rate in figures.get("tokens_per_s", {}).items():
        rows.append((f"tokens a second {when}", "–" if rate is None else f"{rate:,.0f}"))
    return rows


SCENARIO = Scenario(
    name="survive",
    memory="384MiB",
    run=run,
    options=GPU,
    tiny_model=DEEP,
    gpu_memory="576MiB",
    tiny_dtype="float64",
)
