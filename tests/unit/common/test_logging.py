"""Format and ids of log lines."""

import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest

from services.common.logging import (
    FIELDS,
    JsonFormatter,
    TextFormatter,
    request_ids,
    set_up_logging,
    stats,
)
from tests.support.exhausted import no_room_for_files
from tideserve.cli.logs import render


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("services.x", logging.INFO, "x.py", 1, message, (), None)
    made.created = 1767225599.1234
    if fields:
        setattr(made, FIELDS, fields)
    return made


def test_json_lines_have_utc_milliseconds_ids_and_fields() -> None:
    with request_ids("r-1", "f" * 32):
        line = JsonFormatter().format(record("Grüße", worker="w0", total_s=0.5))
    assert json.loads(line) == {
        "time": "2025-12-31T23:59:59.123Z",
        "level": "info",
        "logger": "services.x",
        "message": "Grüße",
        "request_id": "r-1",
        "trace_id": "f" * 32,
        "worker": "w0",
        "total_s": 0.5,
    }
    assert "\n" not in JsonFormatter().format(record("two\nlines"))
    assert "request_id" not in json.loads(JsonFormatter().format(record("later")))


def test_text_records_are_a_single_unambiguous_line() -> None:
    with request_ids("r-1", ""):
        line = TextFormatter().format(record("two\nlines", why="a b", count=3))
    assert line == (
        '2025-12-31T23:59:59.123Z info    services.x: two\\nlines request_id=r-1 why="a b" count=3'
    )


def test_control_characters_are_escaped() -> None:
    controls = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)))
    line = TextFormatter().format(record(f"a{controls}é"))
    assert line.isprintable()
    assert "a\\x00" in line and "\\t\\n" in line and "\\r" in line and "\\x1b" in line
    assert line.endswith("\\u2028\\u2029é")


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_both_formats_are_parsed_by_tideserve_logs(formatter: logging.Formatter) -> None:
    stamp, text = render(formatter.format(record("registered", worker="w0")))
    assert stamp == "2025-12-31T23:59:59.123"
    assert re.search(r"info +.*registered worker=w0$", text)


def test_an_exception_is_logged_in_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        for form in ("json", "text"):
            set_up_logging("warning", form)
            logging.getLogger("x").info("not this")
            try:
                raise ValueError("low tide")
            except ValueError:
                logging.getLogger("x").exception("it failed")
            shown = capsys.readouterr().err
            assert "not this" not in shown
            assert "ValueError: low tide" in shown
            assert (len(shown.splitlines()) == 1) == (form == "json")
    finally:
        logging.basicConfig(handlers=before[0], level=before[1], force=True)


def test_messages_of_request_exceptions_are_not_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exceptions quote their input, which may be text of the client."""
    secret = "low" + "tide"
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        for form in ("json", "text"):
            set_up_logging("warning", form)
            try:
                try:
                    raise KeyError(secret)
                except KeyError as error:
                    inner = [OSError(secret), ValueError(secret)]
                    raise ExceptionGroup(secret, inner) from error
            except ExceptionGroup:
                with request_ids("mine", ""):
                    logging.getLogger("x").exception("it failed")
            shown = capsys.readouterr().err
            assert "it failed" in shown and "mine" in shown
            for kind in ("KeyError", "OSError", "ValueError", "ExceptionGroup"):
                assert f"builtins.{kind}" in shown
            assert "test_messages_of_request_exceptions" in shown, "where it was"
            assert secret not in shown
    finally:
        logging.basicConfig(handlers=before[0], level=before[1], force=True)


def test_lines_lost_to_a_full_disk_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = tmp_path / "log", (logging.getLogger().handlers[:], logging.getLogger().level)
    lost_before = stats.lost_lines
    try:
        with path.open("wb", buffering=0) as file:
            monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(file, write_through=True))
            set_up_logging("info", "text")
            with no_room_for_files():
                logging.getLogger("x").info("lost")
                logging.getLogger("x").warning("lost, too")
            logging.getLogger("x").info("again")
    finally:
        logging.basicConfig(handlers=before[0], level=before[1], force=True)
    assert stats.lost_lines == lost_before + 2
    (line,) = path.read_text().splitlines()
    assert line.endswith("x: again")
