"""Adopted requests and their readers, in any order, against a model that keeps everything."""

from random import Random

import pytest

from services.core.planner.events import EmitToken, RefuseRequest
from services.core.request import FinishReason
from services.worker import arrivals as module
from services.worker.arrivals import ABORTED_MAX, ATTACH_TIMEOUT_S, Arrivals, Expected
from services.worker.ipc import AdoptedRequest, MovedRequest


def adopted(request_id: str, *emitted_ids: int, epoch: int = 2) -> AdoptedRequest:
    return AdoptedRequest(request_id, "g", epoch, list(emitted_ids))


def expected(
    request_id: str, reader: str = "x", epoch: int = 2, now_s: float = 0.0
) -> Expected[str]:
    return Expected(request_id, "g", epoch, 0, reader, now_s + ATTACH_TIMEOUT_S)


def moved(request_id: str, epoch: int) -> MovedRequest:
    return MovedRequest(request_id, "w", "w:1", "g", epoch, 0)


def test_a_request_and_its_reader_may_come_in_either_order() -> None:
    arrivals: Arrivals[str] = Arrivals()
    assert arrivals.adopt(adopted("a", 5), 0.0)
    assert arrivals.match("a") is None
    assert arrivals.expect(expected("a"))
    assert arrivals.expect(expected("b"))
    assert arrivals.match("b") is None
    assert arrivals.adopt(adopted("b"), 0.0)
    for request_id, tokens in (("a", [5]), ("b", [])):
        matched = arrivals.match(request_id)
        assert matched is not None
        assert (matched[0].token_ids, matched[1].reader) == (tokens, "x")
    assert len(arrivals) == 0


def test_tokens_are_kept_up_to_the_ending() -> None:
    arrivals: Arrivals[str] = Arrivals()
    arrivals.adopt(adopted("a", 5), 0.0)
    arrivals.add_token(EmitToken("unknown", 0, 1, None))
    arrivals.add_token(EmitToken("a", 0, 1, None))
    arrivals.add_token(EmitToken("a", 1, 6, FinishReason.STOP))
    arrivals.add_token(EmitToken("a", 2, 7, None))
    assert arrivals.end(RefuseRequest("a", "late")) and not arrivals.end(moved("b", 3))
    arrivals.expect(expected("a"))
    matched = arrivals.match("a")
    assert matched is not None
    assert (matched[0].token_ids, matched[0].ending) == ([5, 6], FinishReason.STOP)


def test_the_last_reader_counts() -> None:
    arrivals: Arrivals[str] = Arrivals()
    arrivals.expect(expected("a", "x"))
    arrivals.expect(expected("a", "y"))
    assert (arrivals.expected_by("x"), arrivals.expected_by("y")) == ([], ["a"])
    arrivals.adopt(adopted("a"), 0.0)
    matched = arrivals.match("a")
    assert matched is not None and matched[1].reader == "y"


@pytest.mark.parametrize(("left_at", "waits"), [(2, True), (3, True), (4, False)])
def test_a_move_of_an_older_epoch_sends_no_reader_away(left_at: int, waits: bool) -> None:
    arrivals: Arrivals[str] = Arrivals()
    arrivals.adopt(adopted("a", epoch=1), 0.0)
    arrivals.end(moved("a", left_at))
    assert arrivals.expect(expected("a", epoch=3))
    assert (arrivals.match("a") is None) == waits


def test_what_has_left_may_come_back_after_its_time() -> None:
    arrivals: Arrivals[str] = Arrivals()
    arrivals.adopt(adopted("a"), 0.0)
    arrivals.end(moved("a", 3))
    assert arrivals.expire(ATTACH_TIMEOUT_S) == ([], [])
    assert arrivals.adopt(adopted("a", epoch=4), ATTACH_TIMEOUT_S)


def test_what_was_given_up_does_not_come_back() -> None:
    arrivals: Arrivals[str] = Arrivals()
    arrivals.adopt(adopted("a"), 0.0)
    assert arrivals.expire(ATTACH_TIMEOUT_S) == (["a"], [])
    assert arrivals.abort("b", ATTACH_TIMEOUT_S) is None
    for request_id in ("a", "b"):
        assert not arrivals.expect(expected(request_id))
        assert not arrivals.adopt(adopted(request_id), ATTACH_TIMEOUT_S)
        # Asked once: the engine has its answer.
        assert arrivals.adopt(adopted(request_id), ATTACH_TIMEOUT_S)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: Arrivals[str] = Arrivals()
    for number in range(ABORTED_MAX + 1):
        arrivals.abort(f"r{number}", 0.0)
    arrivals.check_invariants()
    assert arrivals.adopt(adopted("r0"), 0.0) and not arrivals.adopt(adopted("r1"), 0.0)
    monkeypatch.setattr(module, "EXPECTED_MAX", 2)
    assert [arrivals.expect(expected(f"e{number}")) for number in range(3)] == [True, True, False]
    assert arrivals.expect(expected("e1", "y")), "it takes its own place"


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_lost_or_kept_for_ever(seed: int) -> None:
    rng = Random(seed)
    arrivals: Arrivals[str] = Arrivals()
    now_s = 0.0
    running: set[str] = set()  # at the engine, without a reader
    waiting: set[str] = set()
    for _ in range(300):
        request_id = f"r{rng.randrange(6)}"
        match rng.randrange(6):
            case 0 if request_id not in running:
                if arrivals.adopt(adopted(request_id), now_s):
                    running.add(request_id)
            case 1:
                reader = expected(request_id, now_s=now_s)
                waiting.discard(request_id)
                if arrivals.expect(reader):
                    waiting.add(request_id)
            case 2:
                arrival = arrivals.abort(request_id, now_s)
                assert (arrival is not None and arrival.ending is None) == (request_id in running)
                running.discard(request_id)
                waiting.discard(request_id)
            case 3 if request_id in running:
                running.discard(request_id)
                arrivals.end(moved(request_id, 5))
            case 4:
                now_s += rng.choice([0.0, 1.0, 5.0])
                given_up, disappointed = arrivals.expire(now_s)
                assert running.issuperset(given_up)
                assert waiting.issuperset(e.request_id for e in disappointed)
                running.difference_update(given_up)
                waiting.difference_update(e.request_id for e in disappointed)
        matched = arrivals.match(request_id)
        if matched is not None:
            assert request_id in waiting
            assert (matched[0].ending is None) == (request_id in running)
            running.discard(request_id)
            waiting.discard(request_id)
        arrivals.check_invariants()
    given_up, disappointed = arrivals.expire(now_s + ATTACH_TIMEOUT_S)
    assert set(given_up) == running
    assert {e.request_id for e in disappointed} == waiting
    assert len(arrivals) == 0
