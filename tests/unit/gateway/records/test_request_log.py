"""The log line of a request, and limited lines for a flood of refusals."""

import logging
from collections.abc import Callable

import pytest

from services.common.logging import FIELDS
from services.gateway.records.request_log import REFUSALS_PER_S, RequestLog, fields_of
from services.gateway.records.request_record import (
    RequestMove,
    RequestRecord,
    WorkerSegment,
    new_record,
)
from services.gateway.vocabulary.errors import BadRequest, QueueFull, Unauthorized
from services.gateway.vocabulary.message import Moved

CHAT = "/v1/chat/completions"


def served() -> RequestRecord:
    record = new_record(CHAT, b"mine", 10.0)
    record.endpoint, record.status, record.model = CHAT, 200, "m"
    record.prompt_tokens, record.output_tokens = 5, 7
    record.first_token_s, record.ended_s = 10.75, 12.0
    record.finish_reasons.append("stop")
    choice = record.add_choice()
    choice.queued_s += [(10.1, 10.3), (10.35, 10.4)]
    choice.segments += [WorkerSegment("w0", "g", 1, 10.3), WorkerSegment("w1", "g", 2, 11.0)]
    choice.moves.append(RequestMove(11.0, "w0", Moved("w1", "w1:1", "g", 2)))
    return record


def test_warnings_fit_into_the_headers_of_an_answer() -> None:
    record = served()
    record.warnings = ("short", "x" * 1000, *(f"not enforced: {n}" for n in range(300)))
    headers = record.warning_headers
    assert headers[0] == '299 tideserve "short"' and headers[-1] == '299 tideserve "and 294 more"'
    assert len(headers) == 9 and sum(map(len, headers)) < 2048


def test_warnings_are_quoted_strings() -> None:
    record = served()
    record.warnings = ("$['a\\'\"b'].not",)
    assert record.warning_headers == ("299 tideserve \"$['a\\\\'\\\"b'].not\"",)


def test_the_line_of_a_served_request() -> None:
    record = served()
    assert fields_of(record) == {
        "endpoint": CHAT,
        "status": 200,
        "model": "m",
        "response_id": record.response_id,
        "prompt_tokens": 5,
        "output_tokens": 7,
        "queue_s": 0.25,
        "ttft_s": 0.75,
        "total_s": 2.0,
        "worker": "w1",
        "moved": 1,
        "finish_reason": "stop",
    }


def test_the_line_of_a_refusal() -> None:
    record = new_record(CHAT, None, 1.0)
    record.ended_s = 1.5
    record.fail(QueueFull("full", retry_after_s=2.5))
    assert fields_of(record) == {
        "endpoint": "other",
        "status": 503,
        "code": "queue_full",
        "total_s": 0.5,
        "retry_after_s": 2.5,
    }
    record.fail(BadRequest("wrong"))
    assert fields_of(record)["code"] == "error"
    assert "retry_after_s" not in fields_of(record)


@pytest.mark.parametrize(
    "given", [b"", b"a b", b"a\nb", b"\xc3\xa9", b'"', b"x" * 129, b"<script>", b"%0a", None]
)
def test_an_unsafe_id_is_replaced_by_that_of_the_response(given: bytes | None) -> None:
    record = new_record(CHAT, given, 0.0)
    assert record.client_request_id == record.response_id
    assert record.client_request_id.startswith("chatcmpl-")
    assert new_record("/ready", given, 0.0).client_request_id.startswith("req-")


@pytest.mark.parametrize("given", [b"x" * 128, b"Root=1-67891233-abcdef012345678912345678"])
def test_a_safe_id_is_kept_and_the_response_has_its_own(given: bytes) -> None:
    first, second = new_record(CHAT, given, 0.0), new_record(CHAT, given, 0.0)
    assert first.client_request_id == second.client_request_id == given.decode()
    assert first.response_id != second.response_id


def test_a_flood_of_refusals_gets_some_lines_and_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[tuple[float, Callable[[], None]]] = []
    log = RequestLog(lambda delay_s, call: calls.append((delay_s, call)))
    refused = new_record(CHAT, None, 0.0)
    refused.fail(QueueFull("full"))
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            log.write(refused)
        log.write(served())
        (delay_s, report), *_ = calls
        report()
        lines = [getattr(record, FIELDS) for record in caplog.records]
    kept = [line for line in lines if line.get("status") == 503]
    counted = [line["left_out"] for line in lines if "left_out" in line]
    # All of it within a second, or on a slow machine in some.
    assert REFUSALS_PER_S <= len(kept) <= 5 * REFUSALS_PER_S
    assert len(kept) + sum(counted) == 1000 and delay_s == 1.0
    assert sum(line.get("status") == 200 for line in lines) == 1, "served ones are never left out"


def test_a_flood_of_one_status_does_not_hide_others(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(lambda delay_s, call: None)
    flood, other, failed = (new_record(CHAT, None, 0.0) for _ in range(3))
    flood.fail(Unauthorized("no"))
    other.fail(BadRequest("wrong"))
    failed.fail(QueueFull("full"))
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            log.write(flood)
        log.write(other)
        for _ in range(100):
            log.write(other)
        log.write(failed)
    statuses = [getattr(record, FIELDS)["status"] for record in caplog.records]
    assert statuses.count(401) >= REFUSALS_PER_S and statuses.count(400) >= REFUSALS_PER_S
    assert statuses.count(503) == 1


def test_probes_are_logged_at_debug_level_only(caplog: pytest.LogCaptureFixture) -> None:
    log, probe = RequestLog(), new_record("/ready", None, 0.0)
    probe.endpoint, probe.status = "/ready", 503
    with caplog.at_level(logging.INFO):
        log.write(probe)
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG):
        log.write(probe)
    assert [record.getMessage() for record in caplog.records] == ["/ready 503"]
