"""Texts of `tideserve batch`."""

from pathlib import Path
from typing import Any

import pytest

from tideserve.cli.batch import duration, endpoint_of, progress_line
from tideserve.cli.errors import CommandError


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (200_000, "55 h 33 min")],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_progress_line_shows_known_counts() -> None:
    batch: dict[str, Any] = {
        "status": "in_progress",
        "request_counts": {"total": 50_000, "completed": 1200, "failed": 0},
    }
    assert progress_line(batch) == "in_progress: 1,200 of 50,000 lines"
    batch["request_counts"]["failed"] = 3
    batch["progress"] = {"tokens_per_s": 5123.4, "left_s": 61}
    assert progress_line(batch) == (
        "in_progress: 1,203 of 50,000 lines, 3 failed, 5,123 tokens/s, 1 min 1 s left"
    )


def test_the_first_line_names_the_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "a", "url": "/v1/completions"}\nrest')
    assert endpoint_of(path) == "/v1/completions"
    for text in ("no JSON\n", "[]\n", "{}\n"):
        path.write_text(text)
        with pytest.raises(CommandError, match="the first line"):
            endpoint_of(path)
    for text in ("", "\n"):
        path.write_text(text)
        with pytest.raises(CommandError, match="does not begin with a request"):
            endpoint_of(path)
    with pytest.raises(CommandError):
        endpoint_of(tmp_path / "missing")
