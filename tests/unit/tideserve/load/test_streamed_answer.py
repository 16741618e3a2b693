"""Fields that a client of the bench reads from a stream."""

import json
from typing import Any

from tideserve.load.event_stream import StreamedAnswer


def answer(*choices: dict[str, Any]) -> StreamedAnswer:
    """A stream with an event per second and a choice in each."""
    made = StreamedAnswer()
    made.status = 200
    for second, choice in enumerate(choices):
        made.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n", float(second))
    return made


def test_events_without_a_token_are_not_counted() -> None:
    """Otherwise a stream of such events would never count as silent."""
    made = answer(
        {"text": "a", "token_ids": [1]},
        {"text": "", "token_ids": []},
        {"text": "", "token_ids": [2, 3]},
        {"text": "", "token_ids": [], "finish_reason": "stop"},
    )
    assert made.token_times_s == [0.0, 2.0]
    assert made.output_ids == [1, 2, 3]


def test_text_pieces_count_if_token_ids_are_absent() -> None:
    assert answer({"text": "a"}, {"text": ""}, {"delta": {}}).token_times_s == [0.0, 1.0]


def test_fields_that_clients_compare_are_kept() -> None:
    made = answer({"text": "a", "token_ids": [1]}, {"text": " b", "finish_reason": "length"})
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    made.feed(b"data: " + json.dumps(usage).encode() + b"\n\n", 3.0)
    assert (made.text, made.finish_reason) == ("a b", "length")
    assert (made.prompt_tokens, made.output_tokens) == (7, 2)
