"""`tideserve demo`: the same flood of requests under two overload policies, to look at.

The policies take turns, so that they do not share the processors. Each gets a cluster of its own,
the same requests over HTTP, and at most `FLOOD_LIMIT_S`.
"""

import asyncio
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.live import Live

from bench.arrivals import on_off_arrivals
from bench.client import Client, Job
from bench.errors import SystemUnavailable
from bench.systems.system import Deployment
from bench.systems.tideserve import Tideserve
from bench.workload import TOKEN_ID_MIN, PlannedRequest
from cli.cache import cache_root
from cli.demo_model import NUM_LAYERS, VOCABULARY, write_demo_model
from cli.demo_state import Score, Snapshot, snapshot_of
from cli.demo_view import plain_line, scores_table, screen
from cli.errors import EXIT_FAILED, EXIT_UNUSABLE, CommandError
from cli.model_store import ModelUnavailable, resolve_model
from cli.report import Report
from cli.status import read_status
from services.common.clock import monotonic_s

POLICIES = ("recompute", "drop")
DEVICE = "A100-14B"
MODEL_NAME = "demo-16-layers"
WORKERS = 2
MEMORY_BYTES = 32 << 20
OPTIONS = {
    "load_format": "dummy",
    "chunk_size": "64KiB",
    "ready_timeout": 60.0,
    # A short wait, so that parameters are seen to come back.
    "memmgr": {"relief_dwell_s": 2.0},
}
# (seconds, requests a second): a trickle, a flood that overflows the KV cache, a trickle.
PHASES = ((3.0, 1.0), (8.0, 6.0), (5.0, 0.5))
PROMPT_TOKENS, OUTPUT_TOKENS = 96, 96
LIMIT_S = 160.0
FLOOD_LIMIT_S = 50.0
FLOOD_MIN_S = 20.0
"""With less time than this left, a policy is not begun."""
RELIEF_LIMIT_S = 8.0
FRAME_S, LINE_S = 0.25, 2.0
STATUS_TIMEOUT_S = 2.0
TITLE = (
    f"{WORKERS} workers of {MEMORY_BYTES >> 20} MiB; PACED to {DEVICE}, not this machine's speed"
)


@dataclass(frozen=True, slots=True)
class Load:
    """The same requests for every policy; `timeout_s` ends the sending."""

    requests: tuple[PlannedRequest, ...]
    timeout_s: float


Show = Callable[[float, Snapshot, Sequence[Score]], None]


def run_demo() -> None:
    """Show both policies under the flood, then the figures.

    Raises:
        CommandError: if a cluster cannot run (1), or somebody stopped it (130).
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report, scores = Report(), list[Score]()
    report.line(f"{TITLE}; a model of {NUM_LAYERS} layers with made-up weights")
    end_s = monotonic_s() + LIMIT_S
    try:
        with tempfile.TemporaryDirectory(prefix="tideserve-demo-") as folder:
            model_dir = write_demo_model(Path(folder) / "model", _tokenizer_dir(report))
            for policy in POLICIES:
                _show_policy(policy, model_dir, end_s, report, scores)
    except ModelUnavailable as error:
        raise CommandError(str(error), EXIT_UNUSABLE) from error
    except (SystemUnavailable, OSError) as error:
        raise CommandError(f"the demo cannot run: {error}", EXIT_FAILED) from error
    except KeyboardInterrupt:
        raise CommandError("stopped; nothing is left running", 130) from None
    report.console.print(scores_table(scores))
    if not all(score.completed for score in scores):
        raise CommandError("a policy answered no request in time; is this machine busy?")
    if any(score.failed for score in scores):
        report.warn(
            "not every request was answered in time: this machine is too slow or too busy to keep"
            " the pace, and the figures say little"
        )
    report.line(f"PACED to {DEVICE}; what this machine does itself: tideserve bench burst")


def requests_of_flood() -> tuple[PlannedRequest, ...]:
    """The requests, always the same."""
    rng = Random(7)
    return tuple(
        PlannedRequest(
            arrival_s,
            tuple(rng.randrange(TOKEN_ID_MIN, VOCABULARY) for _ in range(PROMPT_TOKENS)),
            OUTPUT_TOKENS,
            index,
        )
        for index, arrival_s in enumerate(on_off_arrivals(PHASES, rng))
    )


def _tokenizer_dir(report: Report) -> Path:
    return resolve_model(None, cache_root(), report.line, "auto")


def _show_policy(
    policy: str, model_dir: Path, end_s: float, report: Report, scores: list[Score]
) -> None:
    """Start a cluster, flood and watch it, stop it. Appends to `scores`."""
    deployment = Deployment(
        model_dir=model_dir,
        model_name=MODEL_NAME,
        cache=cache_root(),
        workers=WORKERS,
        memory_bytes=MEMORY_BYTES,
        dtype="float32",
        paced=DEVICE,
        options=OPTIONS,
    )
    system = Tideserve(policy, (), deployment)
    try:
        with report.step(f"A cluster with --overload-policy {policy}"):
            system.start(lambda line: None)
        timeout_s = min(FLOOD_LIMIT_S, (end_s - monotonic_s()) / (len(POLICIES) - len(scores)))
        if timeout_s < FLOOD_MIN_S:
            raise SystemUnavailable("starting took too long; this machine is busy")
        load = Load(requests_of_flood(), timeout_s)
        with shown(report) as show:
            asyncio.run(watch(system.urls[0], load, policy, scores, show))
    finally:
        system.stop()


@contextmanager
def shown(report: Report) -> Iterator[Show]:
    """What draws the view: in place on a terminal, else as a line now and then."""
    if not report.fancy:
        said_s = -LINE_S

        def say(elapsed_s: float, snapshot: Snapshot, scores: Sequence[Score]) -> None:
            nonlocal said_s
            if elapsed_s - said_s >= LINE_S:
                said_s = elapsed_s
                report.line(plain_line(elapsed_s, snapshot, scores[-1]))

        yield say
        return
    with Live(console=report.console, auto_refresh=False) as live:
        yield lambda elapsed_s, snapshot, scores: live.update(
            screen(TITLE, elapsed_s, snapshot, scores), refresh=True
        )


async def watch(url: str, load: Load, policy: str, scores: list[Score], show: Show) -> None:
    """Send the requests to `url` and show the cluster until they ended and parameters are back."""
    client = Client(Job((url,), MODEL_NAME, load.requests, load.timeout_s))
    score = Score(policy, len(load.requests))
    scores.append(score)
    started_s = monotonic_s()
    snapshot = Snapshot()
    sending = asyncio.create_task(client.run())
    try:
        relief_end_s = 0.0
        while not sending.done() or (snapshot.merged and monotonic_s() < relief_end_s):
            await asyncio.sleep(FRAME_S)
            if not sending.done():
                relief_end_s = monotonic_s() + RELIEF_LIMIT_S
            snapshot = await asyncio.to_thread(_look, url, snapshot)
            score.note(snapshot, client.records)
            show(monotonic_s() - started_s, snapshot, scores)
        await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def _look(url: str, last: Snapshot) -> Snapshot:
    """The cluster as it is now; the last view of it when it does not answer in time."""
    try:
        return snapshot_of(read_status(url, None, STATUS_TIMEOUT_S))
    except CommandError:
        return last
