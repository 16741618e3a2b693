"""Verdict of `bench front` on its measurements."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.scenarios.front import FRONT, PLAIN, FrontRecord, LoadCost, judge
from benchmarks.systems.process_cost import ProcessCost, kind_of, read_process_cost


def cost(engine_s: float, gateway_s: float, ttft_s: float) -> LoadCost:
    return LoadCost(ProcessCost({"engine": engine_s, "gateway": gateway_s}), 1000, ttft_s)


def record(gateway_s: float, ttft_s: float, p99_s: float) -> FrontRecord:
    """One pair of each load, and one round of each kind of lengths."""
    front = FrontRecord()
    for by in (front.alone, front.together):
        by[FRONT].append(cost(10.0, gateway_s, ttft_s))
        by[PLAIN].append(cost(10.0, 0.5, 0.1))
    for lengths in ("lengths of the trace", "equal lengths"):
        front.dispatch.rates_per_s[lengths] = 2.0
        front.dispatch.ttfts_s[lengths] = {FRONT: [[p99_s] * 3], PLAIN: [[1.0] * 3]}
    return front


def test_bounds_cover_cpu_share_first_token_and_tail() -> None:
    assert judge(record(0.4, 0.105, 0.7)).problems == []
    problems = judge(record(0.6, 0.12, 1.1)).problems
    assert [problem.split(":")[0] for problem in problems] == [
        "one at a time",
        "eight at a time",
        "the control plane takes 6.0 % of the engine's CPU",
        "lengths of the trace",
        "equal lengths",
    ]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("VLLM::EngineCore", "engine"),
        ("python -P services/worker/vllm_engine/__main__.py", "engine"),
        ("python -m services.worker.engine --socket x", "engine"),
        ("python -m services.worker --config x", "worker"),
        ("/cache/etcd/etcd --name tideserve", "etcd"),
        ("python -m vllm.entrypoints.openai.api_server", "vllm server"),
        ("python tideserve up", "other"),
    ],
)
def test_processes_are_identified_by_their_command_line(command: str, kind: str) -> None:
    assert kind_of(command) == kind


@pytest.fixture
def busy_child() -> Iterator[int]:
    """A process whose child has used some CPU time and waits."""
    code = "sum(range(2_000_000)); print(flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(b"\n")


def test_cpu_time_includes_children_and_is_absent_for_ended_processes(busy_child: int) -> None:
    assert read_process_cost([busy_child]).total_s > 0
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert read_process_cost([gone.pid]).total_s == 0
    assert read_process_cost([os.getpid()]).since(ProcessCost()).total_s > 0
