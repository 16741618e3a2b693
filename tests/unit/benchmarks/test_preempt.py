"""`preempt`: what is read from an engine's log, and what is judged."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.interruptions import Noticed, Part, noticed, read_parts
from benchmarks.scenarios.preempt import QUICK, judge, probes
from benchmarks.systems.system import Deployment
from services.common.event_log import EventLog
from services.core.changeover.state import Changeover, MemberConfig
from services.core.planner.config import IterationConfig
from services.core.planner.events import (
    IterationFinished,
    IterationSuspended,
    Planned,
    RequestArrived,
)
from services.core.planner.preemption import Preempt
from services.core.request import Request
from services.core.service import Service, ServiceClass
from tests.unit.core.planner.test_state import make_request
from tideserve.cli.errors import SystemUnavailable

MEASURED: Mapping[str, Any] = {
    "layers": 20,
    "tokens": 2048,
    "iteration_s": [2.0, 1.9, 2.1],
    "noticed": [(0.05, 2.0), (0.09, 1.9), (0.1, 2.0), (0.2, 4.0)],
    "drop_noticed": [(0.1, 2.0), (0.08, 2.0)],
    "drop_prepared_s": [0.5, 0.6],
    "ttft_s": {
        "single": {"always": [0.3, 0.4], "off": [1.0, 2.0]},
        "behind": {"always": [1.5], "off": []},
    },
    "preempted_iterations": 4,
    "resumed_iterations": 4,
    "discarded_tokens": 0,
    "recomputed_tokens": 0,
    "different_tokens": 0,
    "compared_tokens": 9,
}
SAFEPOINTS = {
    "batches": [
        {
            "tokens": 256,
            "without_s": [1.0, 1.0, 1.0],
            "with_s": [1.0, 1.02, 1.03],
            "interval_s": [9.0],
        },
        {
            "tokens": 2048,
            "without_s": [2.0, 2.0, 2.0],
            "with_s": [1.98, 2.01, 2.2],
            "interval_s": [0.1],
        },
    ]
}


def log_of_an_interruption(folder: Path) -> Path:
    """A batch prompt is interrupted by an online request, goes on, and another one follows."""
    config = IterationConfig(
        *(16, 64, 64, 8, 8),
        preempt=Preempt.ALWAYS,
    )
    made_with = MemberConfig("w0", 2, tied_embeddings=False, planner=config)
    state = Changeover.of(made_with)
    log = EventLog(folder, "worker-0", made_with)
    rng = random.Random(0)

    def tell(event: Any) -> None:
        state.handle(event)
        log.append("event", [event])

    def plan(now_s: float) -> None:
        log.append("batch", [Planned(now_s, state.plan(now_s))])

    def batch(name: str) -> Request:
        return replace(make_request(name, 40, 1, rng), service=Service(ServiceClass.BATCH))

    tell(RequestArrived(0.0, batch("batch-a")))
    plan(1.0)
    tell(IterationSuspended(2.0))
    tell(RequestArrived(2.0, make_request("online", 4, 1, rng)))
    plan(2.5)
    tell(IterationFinished(3.0, {"online": 1}))
    plan(3.0)
    tell(IterationFinished(6.0, {"batch-a": 1}))
    plan(6.5)
    tell(RequestArrived(7.0, batch("batch-b")))
    plan(7.0)
    tell(IterationFinished(8.0, {"batch-b": 1}))
    log.close()
    return log.path


def test_parts_of_iterations_are_read_from_the_log(tmp_path: Path) -> None:
    a, online, b = (frozenset({name}) for name in ("batch-a", "online", "batch-b"))
    assert read_parts(log_of_an_interruption(tmp_path)) == [
        Part(1.0, 2.0, a, whole=False),
        Part(2.5, 3.0, online, whole=True),
        Part(3.0, 6.0, a, whole=False),
        Part(7.0, 8.0, b, whole=True),
    ]


def test_what_is_no_log_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("{}\nno\n")
    with pytest.raises(SystemUnavailable):
        read_parts(path)


def test_only_what_comes_while_batch_work_runs_alone_is_noticed_by_it(tmp_path: Path) -> None:
    parts, batch = read_parts(log_of_an_interruption(tmp_path)), frozenset({"batch-a", "batch-b"})
    assert noticed(parts, 1.75, batch) == Noticed(0.25, 4.0)
    assert noticed(parts, 5.0, batch) == Noticed(1.0, 4.0)
    assert noticed(parts, 7.5, batch) == Noticed(0.5, 1.0)
    for idle_or_online_s in (0.5, 2.25, 2.75, 6.5, 9.0):
        assert noticed(parts, idle_or_online_s, batch) is None


def test_all_bars_are_kept() -> None:
    verdict = judge(SAFEPOINTS, MEASURED)
    figures = verdict.figures
    assert not verdict.problems
    assert figures["interval_s"]["p99"] == 0.1
    assert figures["safepoints_share"]["2048"]["median"] == pytest.approx(0.005)
    assert figures["ttft_s"]["single"]["p99_ratio"] == pytest.approx(0.399 / 1.99)
    assert figures["ttft_s"]["behind"]["p99_ratio"] is None
    told = dict(verdict.rows)
    assert "bar 2 ms" in told["online request noticed after"]
    assert "0.20 x; bar 0.25" in told["P99 of first tokens"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"noticed": [(0.11, 2.0)]}, "an online request is noticed 10.0 ms (P99) later"),
        ({"drop_noticed": [(0.5, 2.0)]}, "a drop is noticed 400.0 ms (P99) later"),
        ({"drop_noticed": []}, "when a drop is noticed is unknown"),
        ({"resumed_iterations": 0}, "no iteration was interrupted"),
        ({"different_tokens": 1}, "interrupted work lost something: different tokens: 1"),
        ({"recomputed_tokens": 9}, "recomputed tokens: 9"),
        (
            {"ttft_s": {"single": {"always": [0.6], "off": [2.0]}}},
            "0.30 x of that without preemption",
        ),
        (
            {"ttft_s": {"behind": {"always": [0.6], "off": [2.0]}}},
            "while a batch prompt waits is 0.30 x",
        ),
    ],
)
def test_a_missed_bar_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    measured = dict(MEASURED) | changes
    if "ttft_s" in changes:
        measured["ttft_s"] = MEASURED["ttft_s"] | changes["ttft_s"]
    (told,) = judge(SAFEPOINTS, measured).problems
    assert problem in told


def test_intervals_that_are_not_alike_count_as_long_as_the_slowest() -> None:
    large = SAFEPOINTS["batches"][1] | {"interval_s": [0.1] * 9 + [0.15] * 2}
    verdict = judge({"batches": [large]}, dict(MEASURED) | {"noticed": [(0.15, 2.0)]})
    assert verdict.figures["stretch"] == pytest.approx(1.5)
    assert verdict.figures["noticed"]["intervals"]["p99"] == pytest.approx(1.5)
    assert not verdict.problems


def test_dear_safepoints_are_a_problem() -> None:
    batches = [one | {"with_s": [2.5, 2.5, 2.5]} for one in SAFEPOINTS["batches"]]
    (told,) = judge({"batches": batches}, MEASURED).problems
    assert told == "safepoints cost 25.0% of an iteration of 2048 tokens"


def test_the_probes_get_the_model_and_the_extent(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path / "model", "m", tmp_path, workers=2, memory_bytes=1 << 30)
    found = probes(deployment, QUICK)
    assert [one.part for one in found] == ["safepoints", "preemption"]
    for one in found:
        assert {str(tmp_path / "model"), "bfloat16", "1.0"} <= set(one.arguments)
