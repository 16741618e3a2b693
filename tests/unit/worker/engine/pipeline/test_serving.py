"""Events of requests, and reports of iterations."""

from typing import Any

import pytest

from services.core.cost.iteration_time import IterationTime
from services.core.planner.batch import Microbatch
from services.core.planner.events import (
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.sequence_ids import request_id_of
from tests.support.fake_model import BLOCKS, SHAPE
from tests.support.integer_group import LONG, check_tokens, member, merged, request, start, started
from tests.unit.worker.engine.pipeline.conftest import MakeGroup


def test_ended_requests_leave_the_clock(make_group: MakeGroup) -> None:
    """Otherwise each iteration would scan requests that wait forever."""
    group = make_group(1)
    lone = member(group, "w0")
    clock = lone._serving._clock
    group.start(request(0, output=60))
    group.start(request(1))
    lone.handle(RequestAborted(0.0, "r1"))  # it never ran
    lone.handle(RequestAborted(0.0, "unknown"))
    lone.launch()
    lone.handle(RequestArrived(0.0, request(0)))  # it is here already: refused
    refused = lone.take_outbox().refusals
    assert [command.request_id for command in refused] == ["r0"]
    asked: list[int] = []
    clock.note_launched(lambda: asked.append(1) or [], 1.0)
    assert not asked, "a request waits"
    assert len(clock._entries) == 1
    lone.handle(RequestAborted(0.0, "r0"))
    assert not clock._entries


def test_the_last_event_of_a_request_has_its_times(make_group: MakeGroup) -> None:
    group = make_group(1)
    lone = member(group, "w0")
    group.now_s = 5.0
    lone.handle(RequestArrived(5.0, request(0, output=2)))
    for group.now_s in (6.0, 8.0):
        assert lone.launch()
    news = lone.take_outbox()
    assert [token.index for token in news.tokens] == [0, 1] and bool(news)
    times = news.times["r0"]
    assert (times.wait_s, times.prefill_s, times.decode_s) == (6.0, 0.0, 2.0)
    assert not lone.take_outbox()
    assert not lone.launch()


def test_a_discarded_iteration_runs_again(make_group: MakeGroup) -> None:
    group = make_group(1)
    lone = member(group, "w0")
    group.start(request(0))
    asked: list[list[str]] = []

    def interrupts(microbatch: Microbatch) -> Any:
        asked.append([request_id_of(chunk.seq_id) for chunk in microbatch.batch.chunks])
        return (lambda: True) if len(asked) % 2 else None

    while not group.streams["r0"].over:
        assert lone.launch(interrupts)
        group._hear(group.engines["w0"])
    assert asked == [["r0"]] * (2 * LONG)
    assert lone.iteration_tokens.total == 9 + LONG - 1
    check_tokens(group)


def test_a_request_lost_before_the_planner_is_refused(make_group: MakeGroup) -> None:
    lone = member(make_group(1), "w0")
    refusal = RefuseRequest("r9", "no such grammar")
    lone.refuse(refusal)
    assert lone.take_outbox().refusals == [refusal]


def test_a_preempted_request_continues_identically(make_group: MakeGroup) -> None:
    group = make_group(1)
    tokens = BLOCKS * SHAPE.block_size
    start(group, *(request(number, 12, tokens // 3) for number in range(5)))
    check_tokens(group)
    assert member(group, "w0").state.preemptions_total


def test_stage_times_and_iteration_tokens_are_reported(make_group: MakeGroup) -> None:
    group = merged(make_group())
    ran: list[int] = []

    def run() -> None:
        """Run an iteration of one second."""
        ran.append(1)
        group.network.skip(1.0)  # type: ignore[attr-defined]
        group.now_s += 1.0

    for engine in group.engines.values():
        engine.runner.before_run = run  # type: ignore[attr-defined]
    started(group)
    check_tokens(group)
    leader, last = member(group, "w0"), member(group, "w1")
    busy_s = [member.pipeline_time.pipeline_busy_s for member in (leader, last)]
    assert busy_s == pytest.approx([len(ran) / 2] * 2)
    assert leader.pipeline_time.pipeline_bubble_s > 0
    assert leader.iteration_tokens.total == 4 * (9 + LONG - 1)
    assert not last.iteration_tokens.total
    assert leader.iteration_time == IterationTime(), "there is no cost model to compare with"
    assert not leader.alone and member(make_group(1), "w0").alone
