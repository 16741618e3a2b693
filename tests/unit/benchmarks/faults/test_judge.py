"""Verdict on a fault: each violation is detected and counted once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.faults.judge import (
    STABLE_WITHIN_S,
    STREAMS_MIN,
    CellSeen,
    judge_cell,
    matrix_figures,
    matrix_problems,
)
from benchmarks.faults.matrix import FaultCell, fault_cells
from benchmarks.faults.outcomes import KINDS, StreamOutcome, Undisturbed, ending_of

HIT_S = 10.0
IDS = (5, 6, 7, 8)
WANTED = Undisturbed(IDS, "a bc", "length", 24)
GOOD = StreamOutcome(
    *(IDS, (9.0, 9.5, 11.5, 12.0), 12.0),
    finished=True,
    completion_tokens=4,
    sent_s=8.5,
    text="a bc",
    finish_reason="length",
    prompt_tokens=24,
)
KILL = FaultCell(2, "exchange", "leader", "kill-worker")
GATEWAY = replace(KILL, fault="gateway-kill")


def cell_seen(outcomes: Sequence[StreamOutcome] = (), **changes: Any) -> CellSeen:
    """A valid run with `outcomes` beside the good ones, and `changes`."""
    every = [GOOD] * STREAMS_MIN + list(outcomes)
    cell = CellSeen(KILL, HIT_S, [WANTED] * len(every), every, [GOOD] * 2, 3.0, 9.0, 1.0)
    return replace(cell, **changes)


def cut(count: int, failure: str = "the server closed the connection") -> StreamOutcome:
    return StreamOutcome(
        IDS[:count], GOOD.times_s[:count], 11.0, False, 0, failure, sent_s=8.5, text="a bc"[:count]
    )


@pytest.mark.parametrize(
    ("outcome", "kind", "why"),
    [
        (GOOD, "completed", ""),
        (cut(2), "lost", ""),
        (cut(0, "HTTP 503: try again"), "lost", ""),
        (cut(4), "lost", ""),
        (replace(GOOD, failure="an error event"), "lost", ""),
        (replace(GOOD, finished=False), "lost", ""),
        (replace(cut(3), finished=True, failure="", completion_tokens=3), "lost", ""),
        (replace(cut(2), stuck=True), "stuck", ""),
        (replace(GOOD, token_ids=(*IDS, 9), completion_tokens=5), "duplicated", ""),
        (replace(GOOD, token_ids=(5, 6, 6, 7, 8)), "duplicated", ""),
        (replace(cut(2), token_ids=(*IDS, 8)), "duplicated", ""),
        (replace(GOOD, token_ids=(5, 6, 6, 7)), "different", ""),
        (replace(GOOD, token_ids=(5, 6, 8, 7)), "different", "token 2 is 8, not 7"),
        (replace(cut(2), token_ids=(5, 9)), "different", ""),
        (replace(cut(2), token_ids=(5, 9), stuck=True), "different", ""),
        (
            replace(GOOD, completion_tokens=3),
            "different",
            "usage has 3 completion tokens, not 4",
        ),
        (replace(GOOD, text="a b"), "different", ""),
        (replace(GOOD, text="a bd"), "different", "the text differs"),
        (
            replace(GOOD, finish_reason="stop"),
            "different",
            "the finish reason is 'stop', not 'length'",
        ),
        (replace(GOOD, prompt_tokens=26), "different", "usage has 26 prompt tokens, not 24"),
        (replace(cut(2), text="ab"), "different", ""),
        (replace(cut(2), text="ab", stuck=True), "different", ""),
    ],
)
def test_requests_are_classified_by_their_end(outcome: StreamOutcome, kind: str, why: str) -> None:
    ending, reason = ending_of(outcome, WANTED)
    assert ending == kind and why in reason
    verdict = judge_cell(cell_seen([outcome]))
    assert verdict.requests["sent"] == STREAMS_MIN + 3
    assert sum(verdict.requests[name] for name in KINDS) == STREAMS_MIN + 3
    assert verdict.requests[kind] == 1 + (STREAMS_MIN + 2) * (kind == "completed")
    assert bool(verdict.problems) is (kind != "completed")
    name = f"request {STREAMS_MIN} is {kind} after {len(outcome.token_ids)} of 4 tokens"
    assert all(problem.startswith(name) for problem in verdict.problems[:1])


def test_a_request_without_a_token_at_the_fault_is_silent_from_then_on() -> None:
    late = replace(GOOD, times_s=(12.6, 12.7, 12.8, 12.9), ended_s=12.9)
    assert judge_cell(cell_seen([late])).silence_s == pytest.approx(2.6)
    assert late.silence_s(7.0) == pytest.approx(12.6 - 8.5), "it was sent after that"
    (problem,) = judge_cell(cell_seen([replace(cut(0), ended_s=13.5)])).problems[1:]
    assert problem == "a stream was silent for 3.5 s, more than 3 s"
    ended = replace(cut(0), ended_s=9.9)
    assert judge_cell(cell_seen([ended])).silence_s == 2.0, "it had ended before the fault"


def test_a_valid_run_has_no_problem() -> None:
    verdict = judge_cell(cell_seen())
    assert verdict.problems == []
    assert (verdict.hit, verdict.streams) == (True, STREAMS_MIN)
    assert verdict.silence_s == 2.0, "the silence before the fault does not count"
    assert verdict.stable_s == 3.0


@pytest.mark.parametrize(
    ("fault", "at_most_s"), [("kill-worker", 3), ("stop-engine-12", 8), ("stop-12", 13)]
)
@pytest.mark.parametrize("over_s", [-0.1, 0.1])
def test_a_stream_is_not_silent_for_longer_than_its_fault_explains(
    fault: str, at_most_s: float, over_s: float
) -> None:
    late = replace(GOOD, times_s=(9.0, 9.5, 9.9, 9.9 + at_most_s + over_s))
    late = replace(late, ended_s=late.times_s[-1])
    problems = judge_cell(cell_seen([late], cell=replace(KILL, fault=fault))).problems
    assert ["silent" in problem for problem in problems] == ([True] if over_s > 0 else [])


def test_a_stream_that_waits_for_memory_may_be_silent() -> None:
    late = replace(GOOD, times_s=(9.0, 9.5, 9.9, 80.0), ended_s=80.0)
    crowded = replace(KILL, phase="host_recall", role="leader")
    verdict = judge_cell(cell_seen([late], cell=crowded))
    assert verdict.silence_s == 0.0 and not verdict.problems
    assert judge_cell(cell_seen([late])).problems


def test_a_cell_is_valid_only_if_hit_with_enough_running_streams() -> None:
    assert not judge_cell(cell_seen(hit_s=None)).hit
    assert not judge_cell(cell_seen(hit_s=8.0)).hit, "no stream had begun"
    assert not judge_cell(cell_seen(hit_s=12.0)).hit, "all had their last token"
    # One that was broken off before the fault is none of those that it hit.
    broken, running = replace(cut(2), ended_s=9.9), replace(cut(2), ended_s=11.0)
    for outcome, counts in ((broken, False), (running, True), (GOOD, True)):
        outcomes = [*[GOOD] * (STREAMS_MIN - 1), outcome]
        few = replace(cell_seen(), outcomes=outcomes, wanted=[WANTED] * STREAMS_MIN)
        assert judge_cell(few).hit is counts


def test_a_failure_counts_even_where_the_cell_does_not() -> None:
    verdict = judge_cell(cell_seen([cut(1)], hit_s=None))
    assert verdict.requests["lost"] == 1
    assert verdict.problems


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stable_s": None}, "the cluster did not become stable again"),
        ({"stable_s": STABLE_WITHIN_S + 2}, "the cluster was stable only 32 s after"),
        ({"whole_s": None}, "not all workers serve again"),
        ({"blocks_free_s": None}, "blocks are in use although no request runs"),
        ({"broken": ["I2: nobody holds layer 3"], "violations": 1}, "I2: nobody holds layer 3"),
        ({"probed": [GOOD, cut(1)]}, "request 1 after the fault is lost"),
        ({"probed": [replace(GOOD, token_ids=(5, 6, 7, 9))]}, "request 0 after the fault is diff"),
    ],
)
def test_cluster_violations_are_problems(changes: Any, problem: str) -> None:
    verdict = judge_cell(cell_seen(**changes))
    assert len(verdict.problems) == 1
    assert verdict.problems[0].startswith(problem)


def test_clients_of_a_killed_gateway_are_cut_off_and_its_blocks_are_free_soon() -> None:
    verdict = judge_cell(cell_seen([cut(2)], cell=GATEWAY))
    assert verdict.problems == []
    assert (verdict.requests["lost"], verdict.requests["cut_off"]) == (0, 1)
    assert verdict.requests["sent"] == STREAMS_MIN + 2
    late = judge_cell(cell_seen([cut(2)], cell=GATEWAY, blocks_free_s=16.0))
    assert late.problems == ["blocks of a lost gateway were freed after 16 s"]
    wrong = judge_cell(cell_seen([replace(cut(2), token_ids=(5, 9))], cell=GATEWAY))
    assert wrong.requests["different"] == 1
    short = replace(cut(3), finished=True, failure="", completion_tokens=3)
    ended = judge_cell(cell_seen([short], cell=GATEWAY))
    assert ended.requests["lost"] == 1, "the gateway itself has ended it, too early"


def test_the_list_of_problems_is_bounded() -> None:
    verdict = judge_cell(cell_seen([cut(1)] * 20))
    assert verdict.requests["lost"] == 20
    assert len(verdict.problems) == 13
    assert verdict.problems[-1] == "and 8 more"


def test_a_matrix_is_the_sum_of_its_cells() -> None:
    cells = fault_cells(False, "2/exchange/leader/(kill-worker|stop-12|kill-engine|etcd-kill)$")
    lines = [
        judge_cell(cell_seen()).line(),
        judge_cell(cell_seen(cell=replace(KILL, fault="stop-12"), stable_s=7.0)).line(),
        judge_cell(cell_seen([cut(1)], cell=replace(KILL, fault="kill-engine"), hit_s=None)).line(),
        judge_cell(cell_seen([cut(1)], cell=replace(KILL, phase="steady"))).line(),
    ]
    figures = matrix_figures(lines, cells, lease_s=10.0)
    assert (figures["cells"], figures["cells_wanted"], figures["cells_not_run"]) == (2, 4, 1)
    assert figures["requests"] == {
        "sent": 3 * (STREAMS_MIN + 2) + 1,
        "completed": 3 * (STREAMS_MIN + 2),
        "lost": 1,
        **{"duplicated": 0, "stuck": 0, "different": 0},
    }
    assert figures["longest_silence_s"] == {"seen": 2.0, "unseen": 2.0}
    assert figures["stable_after_s"] == 7.0
    assert figures["violations"] == 0
    by_cell = {cell["fault"]: cell for cell in figures["by_cell"]}
    assert by_cell["kill-worker"]["hit"] is True
    assert by_cell["kill-worker"]["streams"] == STREAMS_MIN
    problems = matrix_problems(figures)
    assert problems == [
        "2/exchange/leader/kill-engine does not count: 0 streams had tokens left at the fault",
        "2/exchange/leader/kill-engine: request 32 is lost after 1 of 4 tokens: the server closed"
        " the connection",
    ]


def test_a_stream_that_never_resumes_is_silent_until_its_timeout() -> None:
    stuck = replace(cut(2), stuck=True, ended_s=99.5)
    assert judge_cell(cell_seen([stuck])).silence_s == 90.0
