"""Output tokens and finish reasons from the events of servers that report them differently."""

from typing import Any

import pytest

from services.worker.openai_engine.completions import Completions
from services.worker.openai_engine.errors import UpstreamFailed, UpstreamLost, UpstreamRefused
from services.worker.openai_engine.output import (
    OutputAssembler,
    StreamedLogprob,
    StreamPiece,
    read_event,
)

STOPS = frozenset({7, 9})


def test_the_last_token_ends_a_request_before_the_server() -> None:
    output = OutputAssembler(3, STOPS)
    first = output.push(StreamPiece((1, 2)))
    assert first is not None and (first.token_ids, first.finish_reason) == ([1, 2], None)
    last = output.push(StreamPiece((3, 4)))
    assert last is not None and (last.token_ids, last.finish_reason) == ([3], "length")
    assert output.finished and output.token_ids == [1, 2, 3]


def test_an_event_without_tokens_adds_none() -> None:
    assert OutputAssembler(3, STOPS).push(StreamPiece()) is None


@pytest.mark.parametrize(
    ("piece", "eos_ids", "wanted"),
    [
        (StreamPiece((1, 7), "stop", 7), (), [1, 7]),  # the server returns the stop token
        (StreamPiece((1, 9, 2)), (), [1, 9]),  # ... and goes on after it
        (StreamPiece((1,), "stop", 9), (), [1, 9]),  # it names the token only
        (StreamPiece((1,), "stop"), (9,), [1, 9]),  # it ends at an end of sequence
        (StreamPiece((1,), "stop", 5), (5,), [1, 7]),  # it names a token that is no stop token
    ],
)
def test_a_stop_token_is_the_last(
    piece: StreamPiece, eos_ids: tuple[int, ...], wanted: list[int]
) -> None:
    output = OutputAssembler(8, STOPS, eos_ids)
    completion = output.push(piece)
    assert completion is not None
    assert (completion.token_ids, completion.finish_reason) == (wanted, "stop")
    assert output.token_ids == wanted


def test_a_stop_token_that_the_server_left_out_has_no_log_probability() -> None:
    rows = ({1: StreamedLogprob(-1.0)},)
    completion = OutputAssembler(8, STOPS).push(StreamPiece((1,), "stop", 7, rows))
    assert completion is not None and completion.logprobs is None
    completion = OutputAssembler(8, STOPS).push(StreamPiece((1,), logprobs=rows))
    assert completion is not None and completion.logprobs == rows


def test_the_last_token_of_text_is_held_back_for_its_finish_reason() -> None:
    output = OutputAssembler(8, STOPS)

    def push(*ids: int, finish: str | None = None) -> object:
        completion = output.push(StreamPiece(ids, finish, counted=False))
        return completion and (completion.token_ids, completion.finish_reason)

    assert push(1) is None
    assert push(2, 3) == ([1, 2], None)
    assert push() is None
    output.begin()  # another stream sends the held token again
    assert push(3) is None
    assert push(finish="length") == ([3], "length")
    assert output.token_ids == [1, 2, 3] and output.finished


def test_text_ends_at_a_stop_token_and_at_the_limit() -> None:
    output = OutputAssembler(8, STOPS)
    completion = output.push(StreamPiece((1, 2), "stop", counted=False))
    assert completion is not None and completion.token_ids == [1, 2, 7]
    limited = OutputAssembler(2, STOPS).push(StreamPiece((1, 2, 3), counted=False))
    assert limited is not None
    assert (limited.token_ids, limited.finish_reason) == ([1, 2], "length")
    with pytest.raises(UpstreamFailed, match="after 0 of 8"):
        OutputAssembler(8, STOPS).push(StreamPiece((), "length", counted=False))


@pytest.mark.parametrize(
    ("piece", "error", "message"),
    [
        (StreamPiece((1,), "length"), UpstreamFailed, "after 1 of 8 tokens"),
        (StreamPiece((1,), "abort"), UpstreamLost, r"ended the request \(abort\)"),
        (StreamPiece((1,), "stop"), UpstreamFailed, "at no stop token"),
    ],
)
def test_other_finish_reasons_are_failures(
    piece: StreamPiece, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        OutputAssembler(8, frozenset()).push(piece)


@pytest.mark.parametrize("ids", [[-1], [64], [2**40], "abc", ["7"], [1.5], [None], [[1]], [True]])
def test_token_ids_outside_the_vocabulary_fail_the_request(ids: Any) -> None:
    with pytest.raises(UpstreamFailed, match="outside the model's vocabulary of 64"):
        read_event(Completions("m").reader(), {"choices": [{"token_ids": ids}]}, 64)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": {"a": 1}},
        {"choices": ["a"]},
        {"choices": 5},
        {"choices": [{"token_ids": 5}]},
        {"choices": [{"token_ids": [5], "logprobs": {"tokens": ["token_id:x"]}}]},
    ],
)
def test_malformed_events_fail_the_request(event: dict[str, Any]) -> None:
    with pytest.raises(UpstreamFailed, match="a malformed event"):
        read_event(Completions("m").reader(), event, 64)


def test_events_of_the_vocabulary_and_errors_are_passed_on() -> None:
    read = Completions("m").reader()
    assert read_event(read, {"choices": [{"token_ids": [0, 63]}]}, 64).token_ids == (0, 63)
    error = {"type": "invalid_request_error", "message": "x" * 10_000}
    with pytest.raises(UpstreamRefused) as raised:
        read_event(read, {"error": error}, 64)
    assert len(str(raised.value)) < 1_000
