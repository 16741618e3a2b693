"""The containers' test without containers: its results, and a missing engine."""

import asyncio
import ipaddress
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import container_cluster
import containers_test
import pytest
from container_checks import configurations, configured
from container_load import Answer, running_streams, stream_until, tokens_by_request
from containers_test import Report

ROOT = Path(__file__).resolve().parents[3]
TOKENS = ("demand", "used", "waiting", "queued", "refused", "forecast", "needed", "stuck")


def test_results_list_each_check_and_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(containers_test, "RESULTS", tmp_path / "build" / "results.json")

    def fail() -> None:
        raise ExceptionGroup("several", [AssertionError("a stream broke")])

    report = Report()
    assert report.check("good", lambda: None) and not report.check("bad", fail)
    report.images = {"tideserve-gateway:test": 10**6}
    report.write()
    results = json.loads((tmp_path / "build" / "results.json").read_text())
    assert [(check["name"], check["ok"]) for check in results["checks"]] == [
        ("good", True),
        ("bad", False),
    ]
    assert results["images"] == {"tideserve-gateway:test": 10**6}
    captured = capsys.readouterr()
    assert "1 passed, 1 failed" in captured.out and "a stream broke" in captured.err
    assert not report.ok


@pytest.mark.parametrize(
    ("verb", "status", "message"), [("start", 77, "PRIVATE_ENGINE=1"), ("stop", 0, "")]
)
def test_nothing_changes_without_a_container_engine(
    tmp_path: Path, verb: str, status: int, message: str
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
    assert message in done.stderr and bool(done.stderr) is bool(message)
    assert not (tmp_path / "engine").exists()


def test_streamed_tokens_are_joined_by_request() -> None:
    lines: list[list[object]] = [
        ["fact", "StreamOpened", {"request_id": "a"}],
        ["fact", "TokensForwarded", {"request_id": "a", "first_index": 0, "token_ids": [1, 2]}],
        ["fact", "TokensForwarded", {"request_id": "b", "first_index": 0, "token_ids": [9]}],
        ["fact", "TokensForwarded", {"request_id": "a", "first_index": 2, "token_ids": [3]}],
    ]
    assert tokens_by_request(lines) == {"a": [1, 2, 3], "b": [9]}


class Cluster:
    """Two workers whose engines have adopted configurations of these stages, and a status."""

    def __init__(self, *stages: list[int], status: dict[str, Any] | None = None) -> None:
        self.stages = stages
        self.shown = status or {}

    def events(self, _service: str, kind: str) -> dict[str, list[list[object]]]:
        assert kind == "EngineSwitched"
        return {
            f"w{number}": [["fact", kind, {"stages": [{}] * count}] for count in counts]
            for number, counts in enumerate(self.stages)
        }

    def status(self) -> dict[str, Any]:
        return self.shown


def test_configurations_are_counted_worker_by_worker() -> None:
    assert configurations(Cluster([1, 2, 1], [1])) == [[1, 2, 1], [1]]  # type: ignore[arg-type]


async def test_a_check_without_a_merge_prints_the_blocking_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("container_checks.CHANGE_TIMEOUT_S", 0.3)
    rule = "w0 left 3 times within 300 s and does not merge for another 87 s"
    decision = {
        **dict.fromkeys(("decided_unix_s", "held_s", "dwell_s", "threshold_tokens"), 0),
        **dict.fromkeys((f"{kind}_tokens" for kind in TOKENS), 0),
        "model": "m",
        "action": "merge",
        "cause": "overload",
        "group_ids": [],
        "waiting": 9,
        "outcome": rule,
    }
    worker = {"id": "w0", "kv_blocks_total": 90, "kv_blocks_free": 2, "running": 7, "waiting": 9}
    group = {"id": "group-w0", "members": ["w0"], "degraded": False}
    status = {"groups": [group], "workers": [worker], "decisions": [decision]}
    await configured(Cluster([1, 2], [2]), stages=2)  # type: ignore[arg-type]
    with pytest.raises(AssertionError) as caught:
        await configured(Cluster([1], [1, 2], status=status), stages=2)  # type: ignore[arg-type]
    text = str(caught.value)
    assert rule in text and "88 of 90 KV blocks" in text and "group group-w0: w0" in text
    with pytest.raises(AssertionError, match="no decisions"):
        empty = {"groups": [], "workers": []}
        await configured(Cluster([], [], status=empty), stages=2)  # type: ignore[arg-type]


async def test_a_flood_continues_until_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, runs = asyncio.Event(), Counter[int]()

    async def finish(_url: str, number: int, _tokens: int) -> Answer:
        runs[number] += 1
        if runs[1] == 5:
            stopped.set()
        await asyncio.sleep(0)
        return Answer(f"{number}-{runs[number]}", "length", 1)

    monkeypatch.setattr("container_load.stream", finish)
    answers = await stream_until("http://nowhere", range(2), 8, stopped)
    assert runs == {0: 5, 1: 5}
    assert {number: answer.request_id for number, answer in answers.items()} == {0: "0-5", 1: "1-5"}


def test_a_broken_stream_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
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
