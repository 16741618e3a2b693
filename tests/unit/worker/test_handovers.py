"""Adopted requests and their readers, in any order, against a model that keeps everything."""

from random import Random

import pytest

from services.core.planner.events import EmitToken, RefuseRequest
from services.core.request import FinishReason
from services.worker import handovers as module
from services.worker.handovers import ABORTED_MAX, ATTACH_TIMEOUT_S, Handovers, WaitingReader
from services.worker.ipc import AdoptedRequest, MovedRequest


def adopted(request_id: str, *emitted_ids: int, epoch: int = 2) -> AdoptedRequest:
    return AdoptedRequest(request_id, "g", epoch, list(emitted_ids))


def expected(
    request_id: str, reader: str = "x", epoch: int = 2, now_s: float = 0.0
) -> WaitingReader[str]:
    return WaitingReader(request_id, "g", epoch, 0, reader, now_s + ATTACH_TIMEOUT_S)


def moved(request_id: str, epoch: int) -> MovedRequest:
    return MovedRequest(request_id, "w", "w:1", "g", epoch, 0)


def test_a_request_and_its_reader_may_come_in_either_order() -> None:
    handovers: Handovers[str] = Handovers()
    assert handovers.adopt(adopted("a", 5), 0.0)
    assert handovers.match("a") is None
    assert handovers.expect(expected("a"))
    assert handovers.expect(expected("b"))
    assert handovers.match("b") is None
    assert handovers.adopt(adopted("b"), 0.0)
    for request_id, tokens in (("a", [5]), ("b", [])):
        matched = handovers.match(request_id)
        assert matched is not None
        assert (matched[0].token_ids, matched[1].reader) == (tokens, "x")
    assert len(handovers) == 0


def test_tokens_are_kept_up_to_the_ending() -> None:
    handovers: Handovers[str] = Handovers()
    handovers.adopt(adopted("a", 5), 0.0)
    handovers.add_token(EmitToken("unknown", 0, 1, None))
    handovers.add_token(EmitToken("a", 0, 1, None))
    handovers.add_token(EmitToken("a", 1, 6, FinishReason.STOP))
    handovers.add_token(EmitToken("a", 2, 7, None))
    assert handovers.end(RefuseRequest("a", "late")) and not handovers.end(moved("b", 3))
    handovers.expect(expected("a"))
    matched = handovers.match("a")
    assert matched is not None
    assert (matched[0].token_ids, matched[0].ending) == ([5, 6], FinishReason.STOP)


def test_the_last_expected_reader_gets_the_request() -> None:
    handovers: Handovers[str] = Handovers()
    handovers.expect(expected("a", "x"))
    handovers.expect(expected("a", "y"))
    assert (handovers.expected_by("x"), handovers.expected_by("y")) == ([], ["a"])
    handovers.adopt(adopted("a"), 0.0)
    matched = handovers.match("a")
    assert matched is not None and matched[1].reader == "y"


@pytest.mark.parametrize(("left_at", "waits"), [(2, True), (3, True), (4, False)])
def test_a_move_of_an_older_epoch_redirects_no_reader(left_at: int, waits: bool) -> None:
    handovers: Handovers[str] = Handovers()
    handovers.adopt(adopted("a", epoch=1), 0.0)
    handovers.end(moved("a", left_at))
    assert handovers.expect(expected("a", epoch=3))
    assert (handovers.match("a") is None) == waits


def test_a_request_that_left_may_return_after_its_timeout() -> None:
    handovers: Handovers[str] = Handovers()
    handovers.adopt(adopted("a"), 0.0)
    handovers.end(moved("a", 3))
    assert handovers.expire(ATTACH_TIMEOUT_S) == ([], [])
    assert handovers.adopt(adopted("a", epoch=4), ATTACH_TIMEOUT_S)


def test_an_abandoned_request_does_not_return() -> None:
    handovers: Handovers[str] = Handovers()
    handovers.adopt(adopted("a"), 0.0)
    assert handovers.expire(ATTACH_TIMEOUT_S) == (["a"], [])
    assert handovers.abort("b", ATTACH_TIMEOUT_S) is None
    for request_id in ("a", "b"):
        assert not handovers.expect(expected(request_id))
        assert not handovers.adopt(adopted(request_id), ATTACH_TIMEOUT_S)
        # Asked once: the engine has its answer.
        assert handovers.adopt(adopted(request_id), ATTACH_TIMEOUT_S)


def test_kept_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    handovers: Handovers[str] = Handovers()
    for number in range(ABORTED_MAX + 1):
        handovers.abort(f"r{number}", 0.0)
    handovers.check_invariants()
    assert handovers.adopt(adopted("r0"), 0.0) and not handovers.adopt(adopted("r1"), 0.0)
    monkeypatch.setattr(module, "EXPECTED_MAX", 2)
    assert [handovers.expect(expected(f"e{number}")) for number in range(3)] == [True, True, False]
    assert handovers.expect(expected("e1", "y")), "it takes its own place"


@pytest.mark.parametrize("seed", range(50))
def test_random_handovers_lose_and_leak_nothing(seed: int) -> None:
    rng = Random(seed)
    handovers: Handovers[str] = Handovers()
    now_s = 0.0
    running: set[str] = set()  # at the engine, without a reader
    waiting: set[str] = set()
    for _ in range(300):
        request_id = f"r{rng.randrange(6)}"
        match rng.randrange(6):
            case 0 if request_id not in running:
                if handovers.adopt(adopted(request_id), now_s):
                    running.add(request_id)
            case 1:
                reader = expected(request_id, now_s=now_s)
                waiting.discard(request_id)
                if handovers.expect(reader):
                    waiting.add(request_id)
            case 2:
                arrival = handovers.abort(request_id, now_s)
                assert (arrival is not None and arrival.ending is None) == (request_id in running)
                running.discard(request_id)
                waiting.discard(request_id)
            case 3 if request_id in running:
                running.discard(request_id)
                handovers.end(moved(request_id, 5))
            case 4:
                now_s += rng.choice([0.0, 1.0, 5.0])
                given_up, disappointed = handovers.expire(now_s)
                assert running.issuperset(given_up)
                assert waiting.issuperset(e.request_id for e in disappointed)
                running.difference_update(given_up)
                waiting.difference_update(e.request_id for e in disappointed)
        matched = handovers.match(request_id)
        if matched is not None:
            assert request_id in waiting
            assert (matched[0].ending is None) == (request_id in running)
            running.discard(request_id)
            waiting.discard(request_id)
        handovers.check_invariants()
    given_up, disappointed = handovers.expire(now_s + ATTACH_TIMEOUT_S)
    assert set(given_up) == running
    assert {e.request_id for e in disappointed} == waiting
    assert len(handovers) == 0
