"""`tideserve demo`: shows the same burst of requests under two overload policies.

The policies run in turn, so that they do not share the CPUs. Each has its own cluster and serves
the same requests over HTTP for at most `FLOOD_LIMIT_S`.
"""

import asyncio
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from rich.live import Live

from services.common.clock import monotonic_s
from tideserve.cli.cache import cache_root
from tideserve.cli.demo_state import ClusterSnapshot, FloodProgress, Score, snapshot_of
from tideserve.cli.demo_view import conclusion, outcome, plain_line, scores_table, screen
from tideserve.cli.errors import EXIT_FAILED, CommandError, SystemUnavailable, unusable
from tideserve.cli.local_cluster import LocalCluster
from tideserve.cli.model_store import ModelUnavailable, resolve_model
from tideserve.cli.report import Report
from tideserve.cli.status import read_status
from tideserve.cli.tiny_model import DEEP, TINY_OPTIONS, VOCABULARY, write_tiny_model
from tideserve.load.client import LEAD_S, Job, LoadClient
from tideserve.load.workload import TOKEN_ID_MIN, PlannedRequest
from tideserve.sim.workload import phased_times

POLICIES = ("recompute", "drop")
DEVICE = "A100-14B"
MODEL_NAME = "demo-16-layers"
WORKERS = 2
MEMORY_BYTES = 32 << 20
OPTIONS: dict[str, Any] = TINY_OPTIONS | {
    "model_name": MODEL_NAME,
    "workers": WORKERS,
    "memory": MEMORY_BYTES,
    "dtype": "float32",
    "paced": DEVICE,
    # Every request is served, however long it waits, so that the policies can be compared.
    "queue_deadline": 160.0,
    "scheduler": {"lateness": 0.0},
    "worker": {"profile_when_idle": False},
    # A short dwell, so that the demo shows how parameters are restored.
    "memmgr": {"split_dwell_s": 2.0},
}
# (seconds, requests per second): low load, a burst that overflows the KV cache, low load.
PHASES = ((3.0, 1.0), (8.0, 6.0), (5.0, 0.5))
PROMPT_TOKENS, OUTPUT_TOKENS = 96, 96
FLOOD_LIMIT_S = 50.0
SPLIT_LIMIT_S = 8.0
START_LIMIT_S = 600.0
"""The first start compiles kernels."""
FRAME_S, LINE_S = 0.25, 2.0
STATUS_TIMEOUT_S = 2.0
TITLE = f"{WORKERS} workers of {MEMORY_BYTES >> 20} MiB, iterations PACED to {DEVICE}"


Show = Callable[[FloodProgress, ClusterSnapshot, Sequence[Score]], None]


def run_demo() -> None:
    """Show both policies under the burst, then the figures.

    Raises:
        CommandError: if a cluster cannot run (1), or the user stopped the demo (130).
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    report, scores = Report(), list[Score]()
    try:
        with (
            unusable(ModelUnavailable),
            tempfile.TemporaryDirectory(prefix="tideserve-demo-") as folder,
        ):
            tokenizer_dir = resolve_model(None, cache_root(), report.line, "auto")
            model_dir = write_tiny_model(Path(folder) / "model", tokenizer_dir, DEEP)
            _introduce(report)
            for policy in POLICIES:
                _show_policy(policy, model_dir, report, scores)
    except (SystemUnavailable, OSError) as error:
        raise CommandError(f"the demo cannot run: {error}", EXIT_FAILED) from error
    except KeyboardInterrupt:
        raise CommandError("stopped; no process is left running", 130) from None
    _conclude(report, scores)


def requests_of_flood() -> tuple[PlannedRequest, ...]:
    """The requests of the burst; always the same, from a fixed seed."""
    rng = Random(7)
    return tuple(
        PlannedRequest(
            arrival_s,
            tuple(rng.randrange(TOKEN_ID_MIN, VOCABULARY) for _ in range(PROMPT_TOKENS)),
            OUTPUT_TOKENS,
            index,
        )
        for index, arrival_s in enumerate(tuple(phased_times(PHASES, 1.0, rng)))
    )


def _introduce(report: Report) -> None:
    count, (calm_s, flood_s, _) = len(requests_of_flood()), (phase[0] for phase in PHASES)
    for line in (
        f"{count} requests arrive, most of them in the {flood_s:.0f} s after the first"
        f" {calm_s:.0f} s:",
        f"more than the KV cache of {WORKERS} workers can hold.",
        "  recompute  queues requests, and preempts others, whose KV is recomputed later",
        "  drop       merges the workers: each keeps a part of the layers, and the memory",
        "             of the other layers becomes KV cache; after the burst they split again",
        f"The model has {DEEP['num_hidden_layers']} layers and random weights. Iterations are",
        f"padded to the times of an {DEVICE}: the figures are not those of this machine.",
    ):
        report.line(line, style="dim")


def _conclude(report: Report, scores: Sequence[Score]) -> None:
    """Raises CommandError if a policy has no figures."""
    report.console.print()
    report.console.print(scores_table(scores))
    report.console.print()
    if not all(score.completed for score in scores):
        raise CommandError("a policy completed no request in time; this machine may be too busy")
    if any(score.failed for score in scores):
        report.warn(
            "some requests did not complete in time: this machine is too slow or too busy for the"
            " pace, so the figures are unreliable"
        )
    else:
        report.line(conclusion(scores), style="bold")
    if not any(score.merged_epochs for score in scores):
        raise CommandError(
            "no workers merged, so the demo shows no difference; this machine may be too busy"
        )
    report.line(
        f"A single burst per policy, PACED to {DEVICE}. For measurements, run: tideserve bench"
        " burst"
    )


def _show_policy(policy: str, model_dir: Path, report: Report, scores: list[Score]) -> None:
    """Start a cluster, send the burst, show the cluster and stop it. Appends to `scores`."""
    cluster = LocalCluster()
    options = OPTIONS | {"model": str(model_dir), "overload_policy": policy}
    try:
        with report.step(f"Starting a cluster with --overload-policy {policy}"):
            cluster.start(options, START_LIMIT_S)
        report.line(f"Live page of this cluster: {cluster.admin_url}", style="dim")
        job = Job((cluster.url,), MODEL_NAME, requests_of_flood(), FLOOD_LIMIT_S)
        with shown(report) as show:
            asyncio.run(watch(job, cluster.admin_url, policy, scores, show))
        report.line(outcome(scores[-1]))
    finally:
        cluster.stop()


@contextmanager
def shown(report: Report) -> Iterator[Show]:
    """A function that shows the state: in place on a terminal, else a line every `LINE_S`."""
    if not report.fancy:
        printed_s = -LINE_S

        def print_line(
            progress: FloodProgress, snapshot: ClusterSnapshot, scores: Sequence[Score]
        ) -> None:
            nonlocal printed_s
            if progress.elapsed_s - printed_s >= LINE_S:
                printed_s = progress.elapsed_s
                report.line(plain_line(progress, snapshot, scores[-1]))

        yield print_line
        return
    with Live(console=report.console, auto_refresh=False, transient=True) as live:
        yield lambda progress, snapshot, scores: live.update(
            screen(TITLE, progress, snapshot, scores), refresh=True
        )


async def watch(job: Job, admin_url: str, policy: str, scores: list[Score], show: Show) -> None:
    """Send the requests and show the cluster until all have ended and layers are restored."""
    client = LoadClient(job)
    score = Score(policy, len(job.requests))
    scores.append(score)
    started_s = monotonic_s()
    snapshot = ClusterSnapshot()
    sending = asyncio.create_task(client.run())
    try:
        split_end_s = 0.0
        while not sending.done() or (snapshot.merged and monotonic_s() < split_end_s):
            await asyncio.sleep(FRAME_S)
            if not sending.done():
                split_end_s = monotonic_s() + SPLIT_LIMIT_S
            snapshot = await asyncio.to_thread(_poll, admin_url, snapshot)
            elapsed_s = monotonic_s() - started_s
            due = sum(request.arrival_s + LEAD_S <= elapsed_s for request in job.requests)
            score.note(snapshot, client.records, elapsed_s)
            show(
                FloodProgress(elapsed_s, due, snapshot.running, len(client.records)),
                snapshot,
                scores,
            )
        await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def _poll(url: str, last: ClusterSnapshot) -> ClusterSnapshot:
    """The current state of the cluster, or `last` if the cluster does not answer in time."""
    try:
        return snapshot_of(read_status(url, None, STATUS_TIMEOUT_S))
    except CommandError:
        return last
