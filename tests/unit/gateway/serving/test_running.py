"""Cancelling by id, and duplicate client-chosen ids."""

import contextlib

import pytest

from services.gateway.bounds.cancel_scope import CancelScope
from services.gateway.keys.principal import Principal
from services.gateway.records.request_record import RequestRecord, gateway_of, new_record
from services.gateway.serving.running import REMEMBER_S, RunningRequests
from services.gateway.vocabulary.errors import CancelledByClient, DuplicateRequest
from tests.support.clock import Clock


class Ended(CancelScope):
    """Records whether it was interrupted; there is no task."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None

    def cancel(self, error: Exception) -> None:
        self.error = error

    @property
    def cancelled(self) -> bool:
        return isinstance(self.error, CancelledByClient)


def served(running: RunningRequests, owner: str, chosen_id: str) -> None:
    """A request that has sent tokens."""
    record = RequestRecord("x", 0.0, principal=Principal(owner), response_id="r")
    with running.entered(record, chosen_id, Ended()):
        record.first_token_s = 1.0


def test_only_the_owner_cancels_by_either_id() -> None:
    running = RunningRequests()
    record = new_record("/v1/completions", None, 0.0)
    record.principal = Principal("anna")
    for request_id in (record.response_id, "mine"):
        ended = Ended()
        with running.entered(record, "mine", ended):
            assert not running.cancel("bob", request_id)
            assert not running.cancel("anna", "another")
            assert not ended.cancelled
            assert running.cancel("anna", request_id) and ended.cancelled
            assert running.cancel("anna", request_id), "twice is no error"
        assert not running.cancel("anna", request_id), "it is over"


def test_a_header_id_cancels_all_requests_that_carry_it() -> None:
    running = RunningRequests()
    with contextlib.ExitStack() as stack:
        events = []
        for _ in range(3):
            record = new_record("/v1/completions", b"of-a-proxy", 0.0)
            record.first_token_s = 1.0
            events.append(Ended())
            stack.enter_context(running.entered(record, None, events[-1]))
        other = new_record("/v1/completions", b"another", 0.0)
        spared = Ended()
        stack.enter_context(running.entered(other, None, spared))
        assert not running.cancel("bob", "of-a-proxy")
        assert running.cancel("", "of-a-proxy")
        assert all(event.cancelled for event in events) and not spared.cancelled
    assert not running.cancel("", "of-a-proxy") and not running.cancel("", "another")


def test_a_header_id_does_not_block_a_chosen_id() -> None:
    running = RunningRequests()
    proxied = new_record("/v1/completions", b"mine", 0.0)
    with (
        running.entered(proxied, None, Ended()),
        running.entered(new_record("/", None, 0.0), "mine", Ended()),
        pytest.raises(DuplicateRequest),
    ):
        served(running, "", "mine")
    both = new_record("/v1/completions", b"mine", 0.0)
    ended = Ended()
    with running.entered(both, "mine", ended):
        assert running.cancel("", "mine") and ended.cancelled
    assert not running.cancel("", "mine")


def test_an_id_can_be_used_once_in_10_minutes() -> None:
    clock = Clock()
    running = RunningRequests(now_s=clock)
    served(running, "anna", "mine")
    with pytest.raises(DuplicateRequest):
        served(running, "anna", "mine")
    served(running, "bob", "mine")
    clock.now_s += REMEMBER_S - 1
    with pytest.raises(DuplicateRequest):
        served(running, "anna", "mine")
    clock.now_s += 1
    served(running, "anna", "mine")


def test_an_id_is_free_again_if_no_token_was_sent() -> None:
    running = RunningRequests()
    record = RequestRecord("x", 0.0, response_id="r")
    with running.entered(record, "mine", Ended()), pytest.raises(DuplicateRequest):
        served(running, "", "mine")
    served(running, "", "mine")


def test_memory_is_bounded_and_running_requests_are_kept() -> None:
    clock = Clock()
    running = RunningRequests(remembered_max=3, now_s=clock)
    record = RequestRecord("x", 0.0, response_id="long")
    with running.entered(record, "runs", Ended()):
        for number in range(10):
            served(running, "", f"id-{number}")
        with pytest.raises(DuplicateRequest):
            served(running, "", "runs")
        with pytest.raises(DuplicateRequest):
            served(running, "", "id-9")
        served(running, "", "id-0")


def test_response_ids_name_their_gateway() -> None:
    gateway = "0123456789abcdef" * 2
    for path, begins in (
        ("/v1/completions", "cmpl-"),
        ("/v1/chat/completions", "chatcmpl-"),
        ("/v1/responses", "resp_"),
        ("/v1/messages", "msg_"),
    ):
        record = new_record(path, b"of-the-client", 0.0, gateway)
        assert record.response_id.startswith(begins)
        assert gateway_of(record.response_id) == gateway[:8]
        assert gateway_of(record.client_request_id) is None
    assert gateway_of(new_record("/v1/completions", None, 0.0, "").response_id) != gateway[:8]
    assert gateway_of("cmpl-0123") is None
