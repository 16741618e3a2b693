"""Reading and rendering logs."""

from pathlib import Path

import pytest

from tideserve.cli.errors import CommandError
from tideserve.cli.logs import Reader, log_paths, render, show_logs

OURS = '{"time": "2026-01-01T00:00:0%d", "level": "info", "logger": "x", "message": "%s"}\n'


def test_json_lines_are_rendered_as_text() -> None:
    assert render(OURS % (1, "registered")) == (
        "2026-01-01T00:00:01",
        "2026-01-01T00:00:01 info    registered",
    )
    etcd = '{"level":"warn","ts":"2026-01-01T00:00:02.5Z","caller":"a.go:1","msg":"slow","took":3}'
    assert render(etcd) == ("2026-01-01T00:00:02.5", "2026-01-01T00:00:02.5 warn    slow took=3")
    text = "2026-01-01T00:00:03.250Z info    services.x: registered worker=w0"
    assert render(text) == ("2026-01-01T00:00:03.250", text)
    assert render("Traceback (most recent call last):\n") == (
        "",
        "Traceback (most recent call last):",
    )
    assert render("42") == ("", "42")


def test_logs_are_merged_by_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.log").write_text(OURS % (1, "one") + "  more of one\n" + OURS % (3, "three"))
    (tmp_path / "bb.log").write_text(OURS % (2, "two"))
    show_logs(tmp_path, None, count=10, follow=False, raw=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["one", "one", "two", "three"]
    assert [line[:5] for line in lines] == ["a  | ", "a  | ", "bb | ", "a  | "]
    show_logs(tmp_path, "a", count=1, follow=False, raw=True)
    assert capsys.readouterr().out == OURS % (3, "three")


def test_new_lines_are_returned_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\n")
    reader = Reader(path, raw=True)
    assert [line.text for line in reader.last(10)] == ["old"]
    assert reader.fresh() == []
    with path.open("a") as file:
        file.write("new\nunfin")
        file.flush()
        assert [line.text for line in reader.fresh()] == ["new"]
        file.write("ished\n")
        file.flush()
        assert [line.text for line in reader.fresh()] == ["unfinished"]
    path.write_text("begun\n")
    assert [line.text for line in reader.fresh()] == ["begun"], "rotated and restarted"


def test_a_missing_log_is_a_short_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there are no logs in"):
        log_paths(tmp_path, None)
    (tmp_path / "gateway.log").touch()
    with pytest.raises(CommandError, match="choose from gateway"):
        log_paths(tmp_path, "worker-7")
