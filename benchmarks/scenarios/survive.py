"""`survive`: a worker of four is killed, alone and in a merged group; etcd stands still for long.

The shape is that of published figures of other systems: 800 requests, 64 at a time, and one of four
workers dies after a quarter of them. No request may fail, and the survivors have to serve what
their share is. It dies once more in a merged group that serves 1.5 times as many tokens as the
others have KV for: no request may fail, and the longest wait is told beside the ideal. Then etcd is
suspended for a minute under a flood in a merged group, which must change no group. Every answer is
compared with an undisturbed one, and the event logs are audited.
"""

import math
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.audit_logs import Audited, audit_logs
from benchmarks.faults.cluster import (
    POLL_S,
    StableWatch,
    blocks_free,
    changed_by_hand,
    is_stable,
    serve_alone,
)
from benchmarks.faults.kept_logs import keep_if_failed
from benchmarks.faults.random_faults import RandomFault, strike
from benchmarks.faults.streams import (
    STALL_S,
    Streams,
    stream_requests,
    undisturbed_answers,
)
from benchmarks.faults.survival import (
    Crowd,
    Loss,
    Outage,
    crowd_figures,
    crowd_problems,
    loss_figures,
    loss_problems,
    outage_figures,
    outage_problems,
)
from benchmarks.group_changes import MERGE_PATH, ChangeFailed, change_groups
from benchmarks.scenarios.scenario import LoadChoice, Trial, TrialVerdict
from benchmarks.steady_load import Shape, SteadyLoad
from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from benchmarks.undisturbed import Undisturbed
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.workload import PlannedRequest

WORKERS_MIN = 4
AT_ONCE = 64
OUTPUT_TOKENS = (48, 80)
KILL_AFTER = 0.25
"""The part of the requests that has ended when the worker dies."""
DISTINCT = 64
"""Requests of the flood, which come again and again."""
CROWD_FACTOR = 1.5
"""KV of all requests at their ends, over what the survivors of a death hold."""
CROWD_PROMPT_TOKENS, CROWD_OUTPUT_TOKENS = (500, 700), (280, 360)
WHOLE_TIMEOUT_S = 120.0
"""A worker that is started anew loads torch, on a machine that serves."""
CHANGE_TIMEOUT_S = 60.0
FLOOD_BEFORE_S, FLOOD_AFTER_S = 3.0, 20.0


@dataclass(frozen=True, slots=True)
class Extent:
    """How many requests a worker dies under, and for how long etcd stands still."""

    requests: int
    outage_s: float


FULL, QUICK = Extent(800, 60.0), Extent(400, 15.0)
"""Both outages are longer than a lease."""


@dataclass(slots=True)
class Survived:
    """What was seen."""

    apart: Loss
    merged: Loss
    crowd: Crowd
    outage: Outage


@dataclass(frozen=True, slots=True)
class _Flood:
    """Requests under which a worker dies, as soon as `dies` says so of their streams."""

    name: str
    requests: Sequence[PlannedRequest]
    wanted: Sequence[Undisturbed]
    at_once: int
    dies: Callable[[Streams], bool]


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start a cluster that keeps event logs, trouble it, and audit the logs."""
    extent = QUICK if choice.quick else FULL
    workers = max(deployment.workers, WORKERS_MIN)
    with tempfile.TemporaryDirectory(prefix="tideserve-survive-") as folder:
        logs = Path(folder) / "events"
        system = changed_by_hand(deployment, workers, {"event_log": str(logs)})
        try:
            system.start(say)
            survived = _trouble(system, deployment, workers, extent, choice.seed, progress)
            progress("replaying and auditing the event logs")
            verdict = judge(survived, audit_logs(logs))
            keep_if_failed(
                "survive", verdict.problems, Path(folder), Path(system.state["logs"]), say
            )
        finally:
            system.stop()
    return verdict


def judge(survived: Survived, audited: Audited) -> TrialVerdict:
    """Figures, and a problem for every property that did not hold."""
    problems = [f"apart: {text}" for text in loss_problems(survived.apart)]
    problems += [f"merged: {text}" for text in loss_problems(survived.merged)]
    problems += [f"crowded: {text}" for text in crowd_problems(survived.crowd)]
    problems += [f"etcd: {text}" for text in outage_problems(survived.outage)]
    problems += audited.problems
    figures = {
        "apart": loss_figures(survived.apart),
        "merged": loss_figures(survived.merged),
        "crowded": crowd_figures(survived.crowd),
        "etcd": outage_figures(survived.outage),
        "invariants_checked": audited.checks,
        "violations": audited.findings.broken,
        "problems": problems,
    }
    return TrialVerdict(figures, _rows(figures), problems)


# --- trouble


def _trouble(
    system: Tideserve,
    deployment: Deployment,
    workers: int,
    extent: Extent,
    seed: int,
    say: Say,
) -> Survived:
    """One fault after the other, each on a cluster that is whole. Raises SystemUnavailable."""
    requests = stream_requests(extent.requests, seed, OUTPUT_TOKENS)
    say("an undisturbed run")
    wanted = undisturbed_answers(system.urls[0], system.model, requests, AT_ONCE)
    rng = Random(seed)

    def late(streams: Streams) -> bool:
        return streams.ended >= KILL_AFTER * len(requests)

    apart = _kill_one(system, workers, _Flood("apart", requests, wanted, AT_ONCE, late), rng, say)
    _merge(system, say)
    merged = _kill_one(system, workers, _Flood("merged", requests, wanted, AT_ONCE, late), rng, say)
    alone_tokens = system.kv_bytes_per_worker() // deployment.kv_bytes_per_token
    crowd = _crowd(system, workers, alone_tokens, seed, rng, say)
    _merge(system, say)
    outage = _stop_etcd(system, extent.outage_s, seed, rng, say)
    _await(system, "blocks are in use at rest", blocks_free)
    return Survived(apart, merged, crowd, outage)


def _crowd(
    system: Tideserve, workers: int, alone_tokens: int, seed: int, rng: Random, say: Say
) -> Crowd:
    """Kill one when all requests have begun, which need more KV than the others have."""
    survivors_tokens = (workers - 1) * alone_tokens
    mean = sum(CROWD_PROMPT_TOKENS + CROWD_OUTPUT_TOKENS) / 2
    count = math.ceil(CROWD_FACTOR * survivors_tokens / mean)
    requests = stream_requests(count, seed, CROWD_OUTPUT_TOKENS, prompt_tokens=CROWD_PROMPT_TOKENS)
    say("crowded: an undisturbed run")
    wanted = undisturbed_answers(system.urls[0], system.model, requests, AT_ONCE)
    _merge(system, say)

    def all_begun(streams: Streams) -> bool:
        return streams.begun == count

    loss = _kill_one(
        system, workers, _Flood("crowded", requests, wanted, count, all_begun), rng, say
    )
    prompts = [len(one.prompt_ids) for one in requests]
    demand_tokens = sum(prompts) + sum(one.output_tokens for one in requests)
    return Crowd(loss, prompts, demand_tokens, survivors_tokens)


def _kill_one(system: Tideserve, workers: int, flood: _Flood, rng: Random, say: Say) -> Loss:
    name, requests, at_once = flood.name, flood.requests, flood.at_once
    say(f"{name}: {len(requests)} requests, {at_once} at a time")
    streams = Streams(system.urls[0], system.model, requests, name, STALL_S, at_once)
    streams.start()
    while streams.running and not flood.dies(streams):
        time.sleep(POLL_S)
    status = read_status(system.admin_url)
    struck = strike(RandomFault("worker"), status, {}, rng)
    hit_s = monotonic_s()
    say(f"{name}: {struck.told}")
    names = {str(one["id"]) for one in status["workers"]}
    lost = {str(one["id"]) for one in status["workers"] if struck.killed & set(one["pids"])}

    def alive(pid: int) -> bool:
        return pid not in struck.killed and psutil.pid_exists(pid)

    alone = StableWatch(_look(system, lambda now: serve_alone(now, names - lost, alive)))
    whole = StableWatch(_look(system, lambda now: is_stable(now, names, alive)))
    try:
        outcomes = streams.wait()
        say(f"{name}: waiting for all workers")
        _await(system, "", lambda now: is_stable(now, names, alive))
    finally:
        alone_s, whole_s = alone.end(), whole.end()
    return Loss(workers, at_once, hit_s, alone_s, whole_s, outcomes, flood.wanted)


def _stop_etcd(system: Tideserve, stopped_s: float, seed: int, rng: Random, say: Say) -> Outage:
    shape = Shape(
        AT_ONCE, output_tokens=OUTPUT_TOKENS, seed=seed, temperature=0.8, distinct=DISTINCT
    )
    requests = [shape.request(number) for number in range(DISTINCT)]
    say("etcd: an undisturbed run of the flood's requests")
    wanted = undisturbed_answers(system.urls[0], system.model, requests)
    outage = Outage(stopped_s)
    names = _names(system)

    def well(status: Mapping[str, Any]) -> bool:
        outage.note(status["groups"])
        return is_stable(status, names, psutil.pid_exists)

    say(f"etcd: a flood, in which it stands still for {stopped_s:.0f} s")
    with SteadyLoad(system.urls[0], system.model, shape, wanted) as load:
        time.sleep(FLOOD_BEFORE_S)
        watch = StableWatch(_look(system, well))
        try:
            strike(RandomFault("etcd", stops_s=stopped_s), {}, system.state["pids"], rng)
            back_s = monotonic_s()
            time.sleep(FLOOD_AFTER_S)
        finally:
            since_s = watch.end()
    outage.settled_s = None if since_s is None else max(0.0, since_s - back_s)
    outage.tally = load.tally
    return outage


def _merge(system: Tideserve, say: Say) -> None:
    say("merging all groups")
    try:
        change_groups(system.admin_url, MERGE_PATH, CHANGE_TIMEOUT_S)
    except ChangeFailed as error:
        raise SystemUnavailable(f"the groups do not merge: {error}") from error
    names = _names(system)
    _await(
        system,
        "the merged group does not settle",
        lambda status: is_stable(status, names, psutil.pid_exists),
    )


def _names(system: Tideserve) -> Collection[str]:
    return [name for name in system.state["pids"] if name.startswith("worker-")]


def _look(system: Tideserve, condition: Callable[[Mapping[str, Any]], bool]) -> Callable[[], bool]:
    """Whether the cluster tells its status, and that fulfils the condition."""

    def look() -> bool:
        try:
            return condition(read_status(system.admin_url))
        except SystemUnavailable:
            return False

    return look


def _await(
    system: Tideserve, otherwise: str, condition: Callable[[Mapping[str, Any]], bool]
) -> None:
    """Wait until it holds. Raises SystemUnavailable(`otherwise`), if that is said."""
    look, deadline_s = _look(system, condition), monotonic_s() + WHOLE_TIMEOUT_S
    while not look():
        if monotonic_s() > deadline_s:
            if otherwise:
                raise SystemUnavailable(otherwise)
            return
        time.sleep(POLL_S)


# --- telling


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for part in ("apart", "merged"):
        rows += [(f"{part}: {what}", text) for what, text in _loss_rows(figures[part])]
    rows += [(f"crowded: {what}", text) for what, text in _crowd_rows(figures["crowded"])]
    outage = figures["etcd"]
    requests = outage["requests"]
    checked = ", ".join(f"{one} {count:,}×" for one, count in figures["invariants_checked"].items())
    return [
        *rows,
        ("etcd: stood still for", _seconds(outage["stopped_s"])),
        ("etcd: changes of groups", str(outage["changes_of_groups"])),
        ("etcd: requests sent / completed", f"{requests['sent']:,} / {requests['completed']:,}"),
        ("etcd: otherwise", _otherwise(requests)),
        ("etcd: all well after its return", _seconds(outage["settled_after_s"])),
        ("invariants checked", checked),
        ("violations", str(figures["violations"])),
    ]


def _loss_rows(part: Mapping[str, Any]) -> list[tuple[str, str]]:
    requests, rates, ratio = part["requests"], part["tokens_per_s"], part["throughput_ratio"]
    return [
        ("requests sent / completed", f"{requests['sent']:,} / {requests['completed']:,}"),
        ("otherwise", _otherwise(requests)),
        ("survivors serve without it after", _seconds(part["alone_after_s"])),
        ("all workers serve after", _seconds(part["whole_after_s"])),
        ("longest silence of a stream", _seconds(part["longest_silence_s"])),
        ("tokens a second before / after", f"{_rate(rates['before'])} / {_rate(rates['after'])}"),
        (
            f"of {part['share_alive']:.0%} of that before",
            "–" if ratio is None else f"{ratio:.0%}",
        ),
    ]


def _crowd_rows(part: Mapping[str, Any]) -> list[tuple[str, str]]:
    requests = part["requests"]
    demand, held = part["demand_tokens"], part["survivors_tokens"]
    return [
        ("KV of all requests / of the survivors", f"{demand:,} / {held:,} tokens"),
        ("requests sent / completed", f"{requests['sent']:,} / {requests['completed']:,}"),
        ("otherwise", _otherwise(requests)),
        ("longest silence of a stream", _seconds(part["longest_silence_s"])),
        ("wait that no order avoids", _seconds(part["ideal_wait_s"])),
    ]


def _otherwise(requests: Mapping[str, int]) -> str:
    others = ("lost", "duplicated", "stuck", "different", "refused", "hung_up")
    found = [(name.replace("_", " "), requests[name]) for name in others if name in requests]
    return ", ".join(f"{name} {count}" for name, count in found)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


TRIAL = Trial(
    name="survive",
    summary="one of four workers is killed, etcd stands still: no request fails, the rest serve on",
    memory="384MiB",
    run=run,
    gpu_memory="576MiB",
    dtype="float64",
)
