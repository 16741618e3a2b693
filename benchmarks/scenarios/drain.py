"""`drain`: all workers are replaced in turn under 64 streams, with `move` and `wait`.

Each worker gets SIGTERM while it runs its share of the streams; `tideserve up` starts its
successor, and the next worker follows once that serves. Figures per value of the workers' option
`drain`: the time from the signal to the end of the process, the longest time between two tokens of
a stream, and the times between two tokens while workers are replaced, beside those of undisturbed
streams. Every answer is compared with its undisturbed answer, and the event logs are audited.
"""

import itertools
import math
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import psutil

from benchmarks.audit_logs import Audited
from benchmarks.faults.cluster import (
    BY_HAND,
    WHOLE_TIMEOUT_S,
    FaultCluster,
    await_true,
    running_cluster,
)
from benchmarks.faults.load import Load, Shape, undisturbed_answers
from benchmarks.faults.outcomes import StreamOutcome, Tally, Undisturbed, request_rows
from benchmarks.scenarios.scenario import GPU, LoadChoice, Scenario, TrialVerdict
from benchmarks.stats import distribution
from benchmarks.systems.system import Deployment, Say
from services.common.clock import monotonic_s
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.tiny_model import DEEP
from tideserve.load.event_stream import OpenAIServer, StreamedAnswer
from tideserve.load.workload import PlannedRequest

WORKERS_MIN = 2
STREAMS = 64
PROMPT_TOKENS, OUTPUT_TOKENS = (48, 96), (500, 560)
TEMPERATURE = 0.8
DRAIN_TIMEOUT_S = 300.0
GONE_MAX_S, GONE_PACED_MAX_S = 15.0, 10.0
"""Longest time from the signal to the end of a worker with `move`, and with a paced worker."""
CONTINUED = ("tideserve_gateway_resumed_streams_total", "tideserve_gateway_moved_streams_total")
"""Streams that continue at another worker, without and with their KV."""
MODES = ("move", "wait")


class RepeatedStreams(Load):
    """`at_once` clients whose next request follows the last one, until `finish`."""

    def __init__(self, url: str, model: str, shape: Shape) -> None:
        self.outcomes: dict[int, StreamOutcome] = {}
        self._answers: dict[int, StreamedAnswer] = {}
        self._finishing = threading.Event()
        numbers = itertools.takewhile(lambda _: not self._finishing.is_set(), itertools.count())
        requests = (self._uncached(shape.request(number), number) for number in numbers)
        super().__init__(url, model, requests, shape.concurrency)

    @property
    def begun(self) -> int:
        """Number of requests with a token so far."""
        return sum(bool(answer.token_times_s) for answer in tuple(self._answers.values()))

    def finish(self) -> None:
        """Send no further requests, and wait until all have ended."""
        self._finishing.set()
        self.join()

    async def _send(self, server: OpenAIServer, number: int, request: PlannedRequest) -> None:
        answer = self._answers[number] = StreamedAnswer()
        self.outcomes[number] = await self._outcome(server, request, answer)

    def _uncached(self, request: PlannedRequest, number: int) -> PlannedRequest:
        """The request with a unique salt, so that repetitions have no cache hits."""
        return replace(request, cache_salt=f"{request.cache_salt}/{number}")


@dataclass(slots=True)
class Rollout:
    """The replacement of all workers; the first three fields have an entry for each."""

    running: list[int] = field(default_factory=list)  # its requests at the signal
    gone_s: list[float] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)  # streams that continued at another worker
    silences_s: list[float] = field(default_factory=list)  # the longest of each stream
    replacing_s: tuple[float, float] = (0.0, 0.0)  # from the first signal until all workers serve
    gaps_s: list[float] = field(default_factory=list)  # between two tokens of a stream meanwhile
    tally: Tally = field(default_factory=Tally)

    def note_streams(
        self, outcomes: Mapping[int, StreamOutcome], wanted: Sequence[Undisturbed]
    ) -> None:
        """Count the ends of the streams, and measure their silences."""
        for number, outcome in sorted(outcomes.items()):
            answer = wanted[number % len(wanted)]
            self.tally.sent += 1
            self.tally.note(number, outcome, len(answer.token_ids), answer)
            self.silences_s.append(max(gaps_of(outcome.times_s), default=0.0))
            self.gaps_s += gaps_of(outcome.times_s, *self.replacing_s)

    def figures(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            "running": self.running,
            "gone_s": self.gone_s,
            "resumed": self.resumed,
            "longest_silence_s": max(self.silences_s, default=None),
            "silence_s": distribution(self.silences_s),
            "replaced_in_s": self.replacing_s[1] - self.replacing_s[0],
            "inter_token_s": distribution(self.gaps_s),
            "requests": self.tally.counts(),
        }


def gaps_of(
    times_s: Sequence[float], began_s: float = -math.inf, ended_s: float = math.inf
) -> list[float]:
    """The times between two tokens, the later of which arrived between `began_s` and `ended_s`."""
    return [
        later_s - earlier_s
        for earlier_s, later_s in pairwise(times_s)
        if began_s <= later_s <= ended_s
    ]


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Replace all workers of a cluster for each value of `drain`, and audit the logs."""
    workers = max(deployment.workers, WORKERS_MIN)
    rollouts: dict[str, Rollout] = {}
    audits: list[Audited] = []
    wanted: list[Undisturbed] = []
    for mode in MODES:
        options = BY_HAND | {"worker": {"drain": mode, "drain_timeout_s": DRAIN_TIMEOUT_S}}
        with running_cluster(deployment, workers, options, say) as cluster:
            mode_say = partial(_say_with, progress, f"{mode}: ")
            rollouts[mode] = roll(cluster, choice.seed, wanted, mode_say)
            audits.append(cluster.audit())
            problems = [*rollouts[mode].tally.problems(), *_broken(audits[-1])]
            cluster.keep_if(problems, "drain", say)
    gone_max_s = GONE_PACED_MAX_S if deployment.paced else GONE_MAX_S
    return judge(rollouts, wanted, audits, gone_max_s)


def roll(cluster: FaultCluster, seed: int, wanted: list[Undisturbed], say: Say) -> Rollout:
    """Replace the workers of a cluster one after the other. Raises SystemUnavailable.

    `wanted`: the undisturbed answers, which are added first if there are none.
    """
    shape = Shape(
        *(STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS),
        seed=seed,
        temperature=TEMPERATURE,
        distinct=STREAMS,
    )
    if not wanted:
        say("an undisturbed run")
        requests = [shape.request(number) for number in range(STREAMS)]
        wanted += undisturbed_answers(cluster.url, cluster.model, requests, STREAMS)
    rollout, streams = Rollout(), RepeatedStreams(cluster.url, cluster.model, shape)
    streams.start()
    try:
        await_true(lambda: streams.begun >= STREAMS, WHOLE_TIMEOUT_S)
        # Later, `workers` lacks those that restart.
        names, began_s = cluster.workers, monotonic_s()
        for name in names:
            say(f"replacing {name}")
            replace_worker(cluster, name, names, rollout)
        rollout.replacing_s = began_s, monotonic_s()
    finally:
        streams.finish()
    rollout.note_streams(streams.outcomes, wanted)
    return rollout


def replace_worker(
    cluster: FaultCluster, name: str, names: Sequence[str], rollout: Rollout
) -> None:
    """Stop a worker, and wait until all of `names` serve. Raises SystemUnavailable."""
    pid, continued = cluster.pids[name], _continued(cluster)
    rows = cluster.status()["workers"]
    rollout.running += [row["running"] for row in rows if row["id"] == name]
    began_s = monotonic_s()
    os.kill(pid, signal.SIGTERM)
    if not await_true(lambda: not psutil.pid_exists(pid), DRAIN_TIMEOUT_S + WHOLE_TIMEOUT_S):
        raise SystemUnavailable(f"{name} does not end")
    rollout.gone_s.append(monotonic_s() - began_s)
    rollout.resumed.append(_continued(cluster) - continued)
    if not await_true(lambda: cluster.stable(names, {pid}), WHOLE_TIMEOUT_S):
        raise SystemUnavailable(f"the successor of {name} does not serve")


def _continued(cluster: FaultCluster) -> int:
    metrics = cluster.metrics()
    return int(sum(metrics.get(name, 0.0) for name in CONTINUED))


def judge(
    rollouts: Mapping[str, Rollout],
    wanted: Sequence[Undisturbed],
    audits: Sequence[Audited],
    gone_max_s: float,
) -> TrialVerdict:
    """Figures, and a problem for every violated property."""
    by_mode = {mode: rollout.figures() for mode, rollout in rollouts.items()}
    undisturbed = distribution([gap_s for answer in wanted for gap_s in gaps_of(answer.times_s)])
    figures: dict[str, Any] = {
        "streams": STREAMS,
        "undisturbed_inter_token_s": undisturbed,
        "gone_s": {mode: max(rollout.gone_s) for mode, rollout in rollouts.items()},
        "longest_silence_s": {mode: part["longest_silence_s"] for mode, part in by_mode.items()},
        **{
            kind: sum(getattr(rollout.tally, kind) for rollout in rollouts.values())
            for kind in ("lost", "duplicated", "stuck", "different")
        },
        **by_mode,
    }
    figures["tokens_identical"] = not (figures["duplicated"] or figures["different"])
    problems = [
        f"{mode}: {text}" for mode, rollout in rollouts.items() for text in rollout.tally.problems()
    ]
    problems += [text for audited in audits for text in _broken(audited)]
    moved = rollouts["move"]
    if max(moved.gone_s) > gone_max_s:
        problems.append(f"move: a worker took {max(moved.gone_s):.1f} s, over {gone_max_s:g} s")
    if not all(moved.resumed):
        problems.append("move: a worker ended without returning a stream")
    figures["problems"] = problems
    rows = [
        (f"{mode}: {row}", text)
        for mode, part in by_mode.items()
        for row, text in (
            *request_rows(part["requests"]),
            ("requests of the workers", ", ".join(map(str, part["running"]))),
            ("workers ended after", ", ".join(f"{gone_s:.1f} s" for gone_s in part["gone_s"])),
            ("streams that moved", ", ".join(map(str, part["resumed"]))),
            ("longest time between two tokens", f"{part['longest_silence_s']:.2f} s"),
            ("P99 between two tokens meanwhile", _p99(part["inter_token_s"])),
        )
    ]
    rows.append(("P99 between two tokens of undisturbed streams", _p99(undisturbed)))
    rows += [row for audited in audits for row in audited.rows]
    return TrialVerdict(figures, rows, problems)


def _broken(audited: Audited) -> list[str]:
    """Problems of an audit; without changes of groups, some invariants have nothing to check."""
    return [*audited.differing, *audited.findings.violations]


def _p99(gaps: Mapping[str, float | None]) -> str:
    return "–" if gaps["p99"] is None else f"{1e3 * gaps['p99']:.0f} ms"


def _say_with(say: Say, label: str, text: str) -> None:
    say(label + text)


SCENARIO = Scenario(
    name="drain",
    memory="768MiB",
    run=run,
    options=GPU | {"paced"},
    tiny_model=DEEP,
    paced_memory="768MiB",
    gpu_memory="960MiB",
    tiny_dtype="float64",
)
