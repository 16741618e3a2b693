"""`recovery`: how soon groups split after a burst has merged all workers, under steady streams.

Clients with a single request each keep 45 % of the unmerged KV in use. A burst merges all
workers into a single group. Two figures are judged: the time from the end of the burst until no
group has more than half of the workers (at most the dwell time plus 15 s), and the time per output
token (TPOT) after that, over that of workers that never merge (`recompute`) under the same streams.
Both systems take turns. Iterations are paced, so that workers do not compete for processors; the
report shows how well the pace was kept.
"""

import itertools
import re
import threading
import time
from asyncio import CancelledError, create_task
from asyncio import wait as first_of
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.faults.cluster import FaultCluster, Status, await_true, is_stable, running_cluster
from benchmarks.faults.load import POLL_S, Load, Shape, Streams, stream_requests
from benchmarks.scenarios.scenario import LoadChoice, Scenario, TrialVerdict
from benchmarks.stats import distribution, quotient
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import BLOCK_TOKENS
from services.common.clock import monotonic_s
from services.core.overload.events import OverloadConfig
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.tiny_model import LARGE_KV
from tideserve.load.event_stream import OpenAIServer, StreamedAnswer, StreamFailed
from tideserve.load.workload import PlannedRequest

WORKERS_MIN = 4
QUICK_ROUNDS, FULL_ROUNDS = 3, 5
PACE = "A100-14B:4"
"""Slow enough for two processors to compute the iterations of four workers in time."""
STEADY_SHARE, BURST_SHARE = 0.45, 1.3
"""KV of the steady streams, and of the burst, over the unmerged KV of all workers."""
PROMPT_TOKENS, OUTPUT_TOKENS = (96, 160), (200, 300)
BURST_PROMPT_TOKENS, BURST_OUTPUT_TOKENS = (300, 400), (60, 100)
WARM_UP_S = 5.0
SPLIT_MARGIN_S = 15.0
WAIT_MAX_S = 45.0
"""How long a round waits for the split."""
WINDOW_S = 25.0
"""TPOT is measured for this long."""
GAPS_MIN = 20
"""Minimum number of gaps between tokens within the window; streams with fewer do not count."""
TPOT_RATIO_MAX = 1.25
LATE = re.compile(r"paced_late_total=(\d+)")
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "drop": {},
    "recompute": {"overload_policy": "recompute"},
}


class EndlessStreams(Load):
    """Clients that send their next request when the last has ended, until `stop`."""

    def __init__(self, url: str, model: str, clients: int, seed: int) -> None:
        self.answers: list[StreamedAnswer] = []
        self.failures: list[str] = []
        self._stopped = threading.Event()
        super().__init__(url, model, self.drawn(clients, seed), clients)

    def stop(self) -> None:
        """Disconnect all clients."""
        self._stopped.set()
        self.join()

    def tpot_s(self, from_s: float, to_s: float) -> list[float]:
        """Mean gap between the tokens of each stream within the time."""
        within = [
            [time_s for time_s in answer.token_times_s if from_s <= time_s <= to_s]
            for answer in list(self.answers)
        ]
        return [(t[-1] - t[0]) / (len(t) - 1) for t in within if len(t) > GAPS_MIN]

    def drawn(self, clients: int, seed: int) -> Iterator[PlannedRequest]:
        """The requests in order; those of the start are under way, at all stages."""
        shape = Shape(clients, PROMPT_TOKENS, OUTPUT_TOKENS, seed=seed)
        for number in itertools.count():
            if self._stopped.is_set():
                return
            request = shape.request(number)
            yield _under_way(request, (number + 1) / clients) if number < clients else request

    async def _send(self, server: OpenAIServer, number: int, request: PlannedRequest) -> None:
        answer = StreamedAnswer()
        self.answers.append(answer)
        sending = create_task(server.complete(self._model, request, answer, lambda: None))
        while not (sending.done() or self._stopped.is_set()):
            await first_of((sending,), timeout=POLL_S)
        sending.cancel()
        try:
            await sending
        except (StreamFailed, OSError) as error:
            self.failures.append(str(error) or type(error).__name__)
        except CancelledError:
            return
        else:
            if answer.error or not answer.finished:
                self.failures.append(answer.error or f"HTTP {answer.status}: {answer.body}")


class GroupWatch:
    """Polls the groups in a thread: (time, members of the largest group, KV tokens in use)."""

    def __init__(self, cluster: FaultCluster) -> None:
        self.samples: list[tuple[float, int, int]] = []
        self._cluster = cluster
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="group watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop polling."""
        self._stopped.set()
        self._thread.join()

    def first_s(self, since_s: float, members_max: int) -> float | None:
        """When, since `since_s`, no group had more than `members_max` members; None if never."""
        times_s = (
            at_s for at_s, size, _ in self.samples if at_s >= since_s and size <= members_max
        )
        return next(times_s, None)

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S / 2):
            try:
                self._note(self._cluster.status())
            except SystemUnavailable:
                continue

    def _note(self, status: Status) -> None:
        if not is_stable(status, self._cluster.workers, psutil.pid_exists):
            return
        used = {w["id"]: w["kv_blocks_total"] - w["kv_blocks_free"] for w in status["workers"]}
        members = [group["members"] for group in status["groups"]]
        blocks = sum(max(used[name] for name in names) for names in members)
        self.samples.append((monotonic_s(), max(map(len, members)), blocks * BLOCK_TOKENS))


@dataclass(slots=True)
class Turn:
    """A turn of a system. Times after the end of the burst, without a burst after the warm-up."""

    unmerged_tokens: int
    clients: int
    merged: bool = False  # all workers were in a single group
    burst_s: float = 0.0
    split_after_s: float | None = None  # no group has more than half of the workers
    singles_after_s: float | None = None
    tpot_s: dict[str, float | None] = field(default_factory=dict)  # within `WINDOW_S`
    halves_tpot_s: dict[str, float | None] = field(default_factory=dict)  # until the next split
    kv_share: float | None = None  # mean KV in use during the measurement, of the unmerged KV
    decode_over_paced: float | None = None  # duration of decoding, over that of the paced device
    late_iterations_min: int = 0  # logged since the start, at least half of their number
    failures: list[str] = field(default_factory=list)


class Trial:
    """A turn of a system in its own cluster."""

    def __init__(self, cluster: FaultCluster, deployment: Deployment, seed: int, say: Say) -> None:
        self._cluster = cluster
        self._workers = deployment.workers
        self._seed = seed
        self._say = say
        per_worker = cluster.kv_bytes_per_worker() // deployment.kv_bytes_per_token
        unmerged = per_worker * deployment.workers
        mean = sum(PROMPT_TOKENS) / 2 + sum(OUTPUT_TOKENS) / 4 + BLOCK_TOKENS / 2
        self.turn = Turn(unmerged, round(STEADY_SHARE * unmerged / mean))

    def run(self, with_burst: bool) -> Turn:
        """Send the steady streams, with a burst or without, and measure."""
        cluster, turn = self._cluster, self.turn
        steady = EndlessStreams(cluster.url, cluster.model, turn.clients, self._seed)
        watch = GroupWatch(cluster)
        steady.start()
        try:
            self._say(f"{turn.clients} steady streams")
            time.sleep(WARM_UP_S)
            since_s = monotonic_s()
            if with_burst:
                since_s = self._burst(watch)
            self._measure(steady, watch, since_s)
        finally:
            watch.stop()
            steady.stop()
        turn.failures += steady.failures
        turn.singles_after_s = _after(watch.first_s(since_s, 1), since_s)
        turn.late_iterations_min = late_iterations(Path(cluster.state["logs"]))
        return turn

    def _burst(self, watch: GroupWatch) -> float:
        """Send the burst; returns the time of its end."""
        turn, began_s = self.turn, monotonic_s()
        mean = sum(BURST_PROMPT_TOKENS + BURST_OUTPUT_TOKENS) / 2
        requests = stream_requests(
            round(BURST_SHARE * turn.unmerged_tokens / mean),
            self._seed,
            BURST_OUTPUT_TOKENS,
            prompt_tokens=BURST_PROMPT_TOKENS,
        )
        self._say(f"a burst of {len(requests)} requests")
        streams = Streams(self._cluster.url, self._cluster.model, requests, "burst")
        streams.start()
        turn.failures += [outcome.failure for outcome in streams.wait() if outcome.failure]
        ended_s = monotonic_s()
        turn.burst_s = ended_s - began_s
        turn.merged = any(
            at_s >= began_s and size == self._workers for at_s, size, _ in watch.samples
        )
        return ended_s

    def _measure(self, steady: EndlessStreams, watch: GroupWatch, since_s: float) -> None:
        turn, half = self.turn, self._workers // 2
        self._say("waiting for the groups to split")
        await_true(lambda: watch.first_s(since_s, half) is not None, WAIT_MAX_S)
        turn.split_after_s = _after(watch.first_s(since_s, half), since_s)
        self._say(f"measuring the time per token for {WINDOW_S:.0f} s")
        before, from_s = self._cluster.counters(), monotonic_s()
        time.sleep(WINDOW_S)
        after, to_s = self._cluster.counters(), monotonic_s()
        turn.tpot_s = distribution(steady.tpot_s(from_s, to_s))
        singles_s = watch.first_s(since_s, 1)
        turn.halves_tpot_s = distribution(
            steady.tpot_s(from_s, to_s if singles_s is None else singles_s)
        )
        used = [tokens for at_s, _, tokens in watch.samples if at_s >= from_s]
        turn.kv_share = quotient(sum(used), len(used) * turn.unmerged_tokens)
        if None not in (after.decode_s, before.decode_s):
            turn.decode_over_paced = quotient(
                (after.decode_s or 0) - (before.decode_s or 0),
                (after.decode_predicted_s or 0) - (before.decode_predicted_s or 0),
            )


def _under_way(request: PlannedRequest, share_left: float) -> PlannedRequest:
    """A request of which only `share_left` of the output is missing: the rest is in the prompt.

    Streams that start like this use as much KV together as later, and do not end together.
    """
    left = max(2, round(share_left * request.output_tokens))
    length = len(request.prompt_ids) + request.output_tokens - left
    prompt = tuple(itertools.islice(itertools.cycle(request.prompt_ids), length))
    return replace(request, prompt_ids=prompt, output_tokens=left)


def late_iterations(logs: Path) -> int:
    """Late iterations of all paced workers, by their last log lines about them."""
    counts = [LATE.findall(path.read_text(errors="replace")) for path in logs.glob("worker-*.log")]
    return sum(int(of_worker[-1]) for of_worker in counts if of_worker)


def _say_with(say: Say, label: str, text: str) -> None:
    say(label + text)


def _after(time_s: float | None, since_s: float) -> float | None:
    return None if time_s is None else time_s - since_s


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Let the systems take turns, each in its own cluster, then judge."""
    deployment = replace(
        deployment,
        workers=max(deployment.workers, WORKERS_MIN),
        paced=deployment.paced or PACE,
    )
    turns: dict[str, list[Turn]] = {name: [] for name in SYSTEMS}
    rounds = QUICK_ROUNDS if choice.quick else FULL_ROUNDS
    for number in range(rounds):
        for name, options in SYSTEMS.items():
            with running_cluster(deployment, deployment.workers, options, say) as cluster:
                label = f"round {number + 1} of {rounds}, {name}: "
                doing = partial(_say_with, progress, label)
                trial = Trial(cluster, deployment, choice.seed * 1000 + number, doing)
                turns[name].append(trial.run(with_burst=name == "drop"))
    return judge(turns, deployment)


def judge(turns: Mapping[str, Sequence[Turn]], deployment: Deployment) -> TrialVerdict:
    """Figures by round, medians, and a problem for every missed bar."""
    split_max_s = OverloadConfig().split_dwell_s + SPLIT_MARGIN_S
    ours, others = turns["drop"], turns["recompute"]
    times_s = [turn.split_after_s for turn in ours if turn.split_after_s is not None]
    ratios = [
        quotient(own.tpot_s["p50"], other.tpot_s["p50"])
        for own, other in zip(ours, others, strict=True)
    ]
    known = [ratio for ratio in ratios if ratio is not None]
    figures: dict[str, Any] = {
        "workers": deployment.workers,
        "paced": deployment.paced,
        # A round without a split has no time, and counts as a missed bar.
        "split_after_s": median(times_s) if len(times_s) == len(ours) else None,
        "split_after_max_s": split_max_s,
        "tpot_ratio": median(known) if known else None,
        "tpot_ratios": ratios,
        "tpot_s": {name: [turn.tpot_s for turn in of] for name, of in turns.items()},
        "rounds": {name: [asdict(turn) for turn in of] for name, of in turns.items()},
    }
    problems = [
        f"{name}: {len(turn.failures)} requests failed, the first: {turn.failures[0]}"
        for name, of in turns.items()
        for turn in of
        if turn.failures
    ]
    if not all(turn.merged for turn in ours):
        problems.append("the burst did not merge all workers; take more of them or less memory")
    if figures["split_after_s"] is None or figures["split_after_s"] > split_max_s:
        problems.append(
            f"{len(ours) - len(times_s)} of {len(ours)} rounds had no split, and the median of the"
            f" others must be at most {split_max_s:g} s"
        )
    if not known or median(known) > TPOT_RATIO_MAX:
        problems.append(f"TPOT after the split is over {TPOT_RATIO_MAX:g} × that of single workers")
    figures["problems"] = problems
    return TrialVerdict(figures, _rows(turns, figures), problems)


def _rows(turns: Mapping[str, Sequence[Turn]], figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    def each(values: Sequence[float | None], form: str) -> str:
        return ", ".join("–" if value is None else form.format(value) for value in values)

    ours = turns["drop"]
    rows = [
        ("paced to", str(figures["paced"])),
        ("split after the burst", each([t.split_after_s for t in ours], "{:.1f} s")),
        ("single workers after the burst", each([t.singles_after_s for t in ours], "{:.1f} s")),
    ]
    for name, of in turns.items():
        rows += [
            (f"{name}: TPOT p50", each([t.tpot_s["p50"] for t in of], "{:.4f} s")),
            (f"{name}: KV in use", each([t.kv_share for t in of], "{:.0%}")),
            (f"{name}: decoding over its pace", each([t.decode_over_paced for t in of], "{:.3f}")),
            (f"{name}: late iterations, at least", each([t.late_iterations_min for t in of], "{}")),
        ]
    halves = each([t.halves_tpot_s["p50"] for t in ours], "{:.4f} s")
    rows.append(("drop: TPOT p50 until single workers", halves))
    return [*rows, ("TPOT over that of single workers", each(figures["tpot_ratios"], "{:.2f}"))]


SCENARIO = Scenario(
    name="recovery",
    memory="36MiB",
    run=run,
    options=frozenset({"paced"}),
    tiny_model=LARGE_KV,
)
