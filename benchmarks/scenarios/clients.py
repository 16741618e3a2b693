"""`clients`: loads of `steady` by third-party load generators, against tideserve and against vLLM.

Each system has a single engine with a single thread, in the fastest dtype of the processor. The
systems alternate by round, and are idle while the other is measured.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.client_process import run_job
from benchmarks.scenarios.scenario import FASTEST, LoadChoice, Scenario, TrialVerdict
from benchmarks.scenarios.steady import MIXES, Mix
from benchmarks.stats import quotient
from benchmarks.systems.load_generators import (
    LOAD_GENERATORS,
    ClientLoad,
    ClientReport,
    MeasuredServer,
    run_generator,
)
from benchmarks.systems.system import Deployment, Say, System
from benchmarks.systems.tideserve import Tideserve
from benchmarks.systems.vllm import Vllm
from tideserve.load.client import Job
from tideserve.sim.report import percentile

OURS, PEER = "tideserve", "vllm"
ROUNDS = 3
FULL_FACTOR = 2
"""Requests of a full run, as a multiple of those of a quick run."""
LIMIT_S = 300.0
FIGURES = (
    ("throughput_tokens_per_s", "throughput"),
    *(("ttft_p50_s", "TTFT P50"), ("ttft_p95_s", "P95")),
    *(("tpot_p50_s", "TPOT P50"), ("tpot_p95_s", "P95")),
)

Reports = dict[tuple[str, str, str], list[ClientReport]]
"""Reports of the rounds, by system, client and load."""


def loads(choice: LoadChoice) -> Sequence[Mix]:
    """The mixes of `steady`; a quick run has only the mixes measured in both dtypes."""
    return [mix for mix in MIXES if mix.again or not choice.quick]


def client_load(mix: Mix, choice: LoadChoice, turn: int, number: int) -> ClientLoad:
    """The load of a round; seeds are unique to a load and a round."""
    factor = 1 if choice.quick else FULL_FACTOR
    seed = (choice.seed * ROUNDS + turn) * len(MIXES) + number
    requests = factor * max(mix.requests, mix.concurrency)
    return ClientLoad(mix.prompt, factor * mix.outputs, requests, mix.concurrency, seed)


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Measure both systems with both clients. Raises SystemUnavailable.

    The systems alternate; vLLM, which takes minutes to start, is only suspended in between.
    """
    alone = replace(deployment, workers=1, cores=deployment.cores[:1])
    clients = [(client, client.ensure(deployment.cache, say)) for client in LOAD_GENERATORS]
    reports: Reports = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tideserve-bench-")))

        def measure(system: System, turn: int) -> None:
            server = MeasuredServer(system.urls[0], system.model, deployment.model_dir)
            for client, python in clients:
                for number, load in enumerate(loads(choice)):
                    progress(f"round {turn + 1}: {load.name} by {client.name}, {system.name}")
                    asked = client_load(load, choice, turn, number)
                    report = run_generator(client, python, server, asked, folder, LIMIT_S)
                    reports.setdefault((system.name, client.name, load.name), []).append(report)

        peer: Vllm | None = None
        for turn in range(1 if choice.quick else ROUNDS):
            options = {**alone.options, "threads": 1}
            ours = Tideserve(OURS, (), replace(alone, options=options))
            with contextlib.ExitStack() as one_turn:
                one_turn.callback(ours.stop)
                ours.start(say)
                kv_bytes = ours.kv_bytes_per_worker()
                measure(ours, turn)
            if peer is None:
                peer = Vllm(PEER, (), replace(alone, kv_bytes=kv_bytes))
                stack.callback(peer.stop)
                peer.start(say)
                for load in loads(choice):  # vLLM compiles at the first use of each batch size
                    progress(f"rehearsing {load.name}, {PEER}")
                    made = load.workload(choice, ROUNDS).requests
                    job = Job(tuple(peer.urls), peer.model, made, LIMIT_S, load.concurrency)
                    run_job(job, lambda line: None)
            peer.wake()
            measure(peer, turn)
            peer.rest()
    return judge(reports, choice, deployment.dtype)


def judge(measured: Reports, choice: LoadChoice, dtype: str) -> TrialVerdict:
    """Medians over the rounds, and ratios tideserve / vLLM. Lost requests are problems."""
    figures: dict[str, Any] = {"dtype": dtype, "systems": {}, "ratios": {}}
    rows, problems = [], []
    for (system, client, load), reports in measured.items():
        of_system = figures["systems"].setdefault(system, {})
        of_system.setdefault(client, {})[load] = {
            "rounds": [asdict(report) for report in reports],
            **{key: _median([asdict(report)[key] for report in reports]) for key, _ in FIGURES},
        }
    for number, mix in enumerate(loads(choice)):
        wanted = client_load(mix, choice, 0, number).requests
        for client in (generator.name for generator in LOAD_GENERATORS):
            pair = [figures["systems"][name][client][mix.name] for name in (OURS, PEER)]
            for name, of_load in zip((OURS, PEER), pair, strict=True):
                # Figures over fewer requests would favour a system that fails under load.
                least = min(report["completed"] for report in of_load["rounds"])
                if least < wanted:
                    problems.append(
                        f"{client} completed {least} of {wanted} requests of {mix.name} against"
                        f" {name}; give more --memory, or stop other programs"
                    )
            ours, peer = pair
            compared = {key: quotient(ours[key], peer[key]) for key, _ in FIGURES}
            ratios = {key: ratio for key, ratio in compared.items() if ratio is not None}
            figures["ratios"].setdefault(client, {})[mix.name] = ratios
            shown = [f"{label} {ratios[key]:.2f} ×" for key, label in FIGURES if key in ratios]
            rows.append((f"{mix.name} by {client}", ", ".join(shown)))
    return TrialVerdict(figures, rows, problems)


def _median(values: Sequence[float | None]) -> float | None:
    return percentile([value for value in values if value is not None], 0.5)


SCENARIO = Scenario(
    name="clients",
    memory="1GiB",
    run=run,
    dtype=FASTEST,
)
