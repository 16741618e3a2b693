"""Output of a command in a log that is read while it is written."""

import io

import pytest

from tideserve.cli.report import Report


class Recorder(io.StringIO):
    """A stream that records each write."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.writes: list[str] = []
        self._terminal = terminal

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_a_box_logs_its_title_before_its_rows(terminal: bool) -> None:
    stream = Recorder(terminal)
    Report(stream).box("it is ready", [("URL", "http://here"), ("Stop", "Ctrl-C")])
    [write] = [text for text in stream.writes if "it is ready" in text]
    assert "http://here" in write
    assert "Ctrl-C" in write
