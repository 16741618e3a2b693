"""Batch lines that resume after the tokens of an earlier start."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.adapter import Adapter
from services.gateway.api.completion import parse_completion
from services.gateway.batches.rows import BatchRow, ClaimedLine
from services.gateway.http.line_door import LineCall, LineDoor

LINE = ClaimedLine("b", 0, "c", 0, 10, 0, output_ids=(7, 8))
ADAPTER = Adapter("tone", "0f" * 32, "/adapters/tone", 8)


def call_of(**fields: Any) -> LineCall:
    """A line that has started; "tone" is an adapter."""
    models = {"m": SimpleNamespace(adapter=None), "tone": SimpleNamespace(adapter=ADAPTER)}
    serving = SimpleNamespace(models=SimpleNamespace(find=models.get))
    door = cast(LineDoor, SimpleNamespace(serving=serving, incarnation="i"))
    batch = cast(BatchRow, SimpleNamespace(endpoint="/v1/completions"))
    call = LineCall(door, batch, LINE)
    call._prepare(parse_completion({"model": "m", "prompt": "hi"} | fields))
    call._record.add_choice()
    return call


def test_a_resumed_line_continues_after_its_tokens() -> None:
    assert call_of().output_ids == LINE.output_ids


@pytest.mark.parametrize("fields", [{"model": "tone"}, {"n": 2}, {"logprobs": 1}])
def test_a_line_that_cannot_resume_exactly_restarts(fields: dict[str, Any]) -> None:
    call = call_of(**fields)
    assert call.output_ids is None
    assert not call._record.choices[0].output_ids, "the tokens of the earlier start are dropped"
