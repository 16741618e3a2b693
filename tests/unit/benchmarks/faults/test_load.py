"""Loads of fault runs: received tokens are kept and requests counted by their end."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.faults.load import Shape, SteadyLoad, Streams, stream_requests
from benchmarks.faults.outcomes import ERRORS_MAX, StreamOutcome, Tally, Undisturbed
from tests.support.fake_openai import fake_openai
from tests.support.waiting import eventually
from tideserve.load.workload import PlannedRequest


def requests_of(*first_tokens: int) -> list[PlannedRequest]:
    return [PlannedRequest(0.0, (first,), 3, first, temperature=0.8) for first in first_tokens]


def test_requests_are_derived_from_their_seed() -> None:
    requests = stream_requests(60, 3, (5, 9))
    assert requests == stream_requests(60, 3, (5, 9)) != stream_requests(60, 4, (5, 9))
    assert len({request.seed for request in requests}) == 60
    shape = Shape(prompt_tokens=(2, 5), output_tokens=(3, 4), token_ids=(7, 9))
    steady = [shape.request(number) for number in range(50)]
    assert steady == [shape.request(number) for number in range(50)]
    assert {len(request.prompt_ids) for request in steady} == {2, 3, 4, 5}
    assert {request.output_tokens for request in steady} == {3, 4}
    assert {token for request in steady for token in request.prompt_ids} == {7, 8, 9}


def test_each_stream_ends_as_its_client_sees_it() -> None:
    """Prompt 7: a stream without its end; 8: an error event; 9: refused."""
    with fake_openai() as server:
        server.behaviour = {7: "cut", 8: "error", 9: 503}
        streams = Streams(server.url, "fake", requests_of(6, 7, 8, 9), "salt")
        streams.start()
        good, broken, failed, refused = streams.wait()
        sent = server.received
    assert not streams.running
    assert {body["cache_salt"] for body in sent} == {"salt"}
    assert {body["temperature"] for body in sent} == {0.8}
    assert all(body["return_token_ids"] for body in sent)
    assert good.finished
    assert (good.failure, good.completion_tokens, len(good.times_s)) == ("", 3, 3)
    assert good.ended_s >= good.times_s[-1]
    assert (broken.failure, broken.finished, broken.completion_tokens) == ("", False, 0)
    assert failed.failure
    assert refused.failure.startswith("HTTP 503")
    assert not any(outcome.stuck for outcome in (good, broken, failed, refused))


def test_concurrent_requests_are_bounded() -> None:
    with fake_openai() as server:
        streams = Streams(server.url, "fake", requests_of(*range(6, 12)), "salt", at_once=2)
        streams.start()
        outcomes = streams.wait()
    assert streams.ended == len([outcome for outcome in outcomes if outcome.finished]) == 6
    for number, later in enumerate(outcomes[2:], 2):
        ended = [other for other in outcomes[:number] if other.ended_s <= later.times_s[0]]
        assert len(ended) >= number - 1, "two others were still running"


def test_batch_work_begins_before_the_others() -> None:
    planned = stream_requests(5, 1, (3, 3), batch=2)
    assert [request.slo_class for request in planned] == ["batch"] * 2 + ["standard"] * 3
    assert [replace(request, slo_class="standard") for request in planned] == stream_requests(
        5, 1, (3, 3)
    )
    requests = [
        replace(request, prompt_ids=(6 + number,)) for number, request in enumerate(planned)
    ]
    with fake_openai() as server:
        streams = Streams(server.url, "fake", requests, "salt")
        streams.start()
        outcomes = streams.wait()
        assert [body.get("slo_class") for body in server.received][:2] == ["batch"] * 2
    firsts = [outcome.times_s[0] for outcome in outcomes]
    assert all(outcome.finished for outcome in outcomes) and max(firsts[:2]) <= min(firsts[2:])


def test_a_silent_stream_times_out() -> None:
    with fake_openai() as server:
        server.behaviour = {6: "silent"}
        streams = Streams(server.url, "fake", requests_of(6), "salt")
        streams.stall_s = 1.0
        streams.start()
        (outcome,) = streams.wait()
    assert outcome.stuck and not outcome.hung_up
    assert outcome.failure == "no token for 1 s"


async def test_a_steady_load_counts_how_requests_end() -> None:
    """Token 7: a stream that is cut; 8: an error event; 9: refused."""
    shape = Shape(4, (1, 1), (3, 3), (6, 9))
    with fake_openai() as server:
        server.behaviour = {7: "cut", 8: "error", 9: 503}
        with SteadyLoad(server.url, "fake", shape) as load:
            await eventually(lambda: load.tally.ended >= 40)
        assert not load.running
    tally = load.tally
    assert tally.ended == tally.sent >= 40
    assert min(tally.completed, tally.lost, tally.refused) > 0
    assert tally.stuck == tally.duplicated == 0
    assert len(tally.errors) == min(tally.lost, ERRORS_MAX)


async def test_an_impatient_client_hangs_up() -> None:
    with fake_openai() as server:
        server.behaviour = {6: "silent"}
        load = SteadyLoad(server.url, "fake", Shape(1, (1, 1), (3, 3), (6, 6)))
        load.stall_s = 0.5
        with load:
            await eventually(lambda: load.tally.hung_up == 1)
    assert load.tally.stuck == load.tally.sent - load.tally.hung_up >= 9


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "completed"),
        ({"token_ids": (0, 1, 2, 4)}, "different"),
        ({"prompt_tokens": 2}, "different"),
    ],
)
async def test_a_steady_load_compares_outputs(changes: dict[str, Any], kind: str) -> None:
    wanted = replace(Undisturbed((0, 1, 2, 3), "0 1 2 3 ", "length", 1), **changes)
    shape = Shape(concurrency=1, output_tokens=(4, 4), distinct=2)
    with fake_openai() as server, SteadyLoad(server.url, "fake", shape, [wanted] * 2) as load:
        await eventually(lambda: load.tally.ended > 2)
    tally = load.tally
    assert getattr(tally, kind) == tally.sent - tally.hung_up > 0


@pytest.mark.parametrize(
    ("ids", "usage_tokens", "kind"),
    [((0, 1, 2), 4, "lost"), ((0, 1, 2, 3), 4, "completed"), ((0, 1, 2, 3, 4), 4, "duplicated")],
)
def test_received_tokens_count_instead_of_usage(
    ids: tuple[int, ...], usage_tokens: int, kind: str
) -> None:
    tally = Tally()
    outcome = StreamOutcome(ids, (1.0,) * len(ids), 2.0, True, usage_tokens)
    tally.note(0, outcome, 4, Undisturbed((0, 1, 2, 3)))
    assert getattr(tally, kind) == 1 and tally.tokens == len(ids)


@pytest.mark.parametrize(
    ("usage_tokens", "changes", "kind"),
    [
        (4, {}, "completed"),
        (3, {}, "lost"),
        (4, {"finished": False}, "lost"),
        (4, {"failure": "an error event"}, "lost"),
        (5, {}, "duplicated"),
        (2, {"stuck": True, "finished": False}, "stuck"),
        (0, {"status": 429, "finished": False}, "refused"),
        (0, {"hung_up": True, "finished": False}, "hung_up"),
    ],
)
def test_without_an_undisturbed_run_usage_counts(
    usage_tokens: int, changes: dict[str, Any], kind: str
) -> None:
    tally = Tally()
    tally.note(0, replace(StreamOutcome((), (), 2.0, True, usage_tokens), **changes), 4, None)
    assert getattr(tally, kind) == tally.ended == 1
