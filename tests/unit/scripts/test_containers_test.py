"""The containers' test beside the containers: its results, and what it does without an engine."""

import asyncio
import ipaddress
import json
import subprocess
from pathlib import Path

import container_cluster
import containers_test
import pytest
from container_checks import configurations
from container_load import running_streams, tokens_by_request
from containers_test import Report

ROOT = Path(__file__).resolve().parents[3]


def test_results_tell_each_check_and_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(containers_test, "RESULTS", tmp_path / "build" / "results.json")

    def fail() -> None:
        raise ExceptionGroup("several", [AssertionError("a stream broke")])

    report = Report()
    assert report.check("good", lambda: None) and not report.check("bad", fail)
    report.images = {"tideserve-gateway:test": 10**6}
    report.write()
    told = json.loads((tmp_path / "build" / "results.json").read_text())
    assert [(check["name"], check["ok"]) for check in told["checks"]] == [
        ("good", True),
        ("bad", False),
    ]
    assert told["images"] == {"tideserve-gateway:test": 10**6}
    captured = capsys.readouterr()
    assert "1 passed, 1 failed" in captured.out and "a stream broke" in captured.err
    assert not report.ok


@pytest.mark.parametrize(
    ("verb", "status", "said"), [("start", 77, "PRIVATE_ENGINE=1"), ("stop", 0, "")]
)
def test_without_an_engine_nothing_is_changed(
    tmp_path: Path, verb: str, status: int, said: str
) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "container_engine.sh", verb],
        env={"PATH": "/usr/bin:/bin", "ENGINE_FOLDER": str(tmp_path / "engine")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr and bool(done.stderr) is bool(said)
    assert not (tmp_path / "engine").exists()


def test_the_tokens_of_a_request_are_put_together() -> None:
    lines: list[list[object]] = [
        ["fact", "StreamOpened", {"request_id": "a"}],
        ["fact", "TokensForwarded", {"request_id": "a", "first_index": 0, "token_ids": [1, 2]}],
        ["fact", "TokensForwarded", {"request_id": "b", "first_index": 0, "token_ids": [9]}],
        ["fact", "TokensForwarded", {"request_id": "a", "first_index": 2, "token_ids": [3]}],
    ]
    assert tokens_by_request(lines) == {"a": [1, 2, 3], "b": [9]}


def test_configurations_are_counted_worker_by_worker() -> None:
    class Logs:
        def events(self, _service: str) -> dict[str, list[list[object]]]:
            switched = [["fact", "EngineSwitched", {"stages": [{}] * n}] for n in (1, 2, 1)]
            return {"one": [["event", "Other", {}], *switched], "two": switched[:1]}

    assert configurations(Logs()) == [[1, 2, 1], [1]]  # type: ignore[arg-type]


def test_a_stream_that_breaks_breaks_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_url: str, number: int, _tokens: int, progress: object) -> None:
        progress.first()  # type: ignore[attr-defined]
        if number == 1:
            raise AssertionError("the stream ended early")

    async def scenario() -> None:
        async with running_streams("http://nowhere", 2, 8):
            await asyncio.sleep(0)

    monkeypatch.setattr("container_load.stream", broken)
    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(scenario())
    assert "ended early" in str(caught.value.exceptions[0])


def test_ports_and_subnet_are_free() -> None:
    assert 0 < container_cluster.free_ports(2) < 65535
    assert ipaddress.ip_network(container_cluster.free_subnet()).is_private
