"""What `survive` makes of what it has seen, and that it keeps the logs of a run that failed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.audit_logs import INVARIANTS, Audited
from benchmarks.faults import kept_logs
from benchmarks.faults.kept_logs import keep_logs, logs_folder
from benchmarks.scenarios import survive
from benchmarks.scenarios.scenario import LoadChoice
from benchmarks.scenarios.survive import Survived, judge
from benchmarks.systems.system import Deployment
from services.core.audit.findings import Findings
from tests.support.survived import CUT, crowd, loss, outage
from tideserve.cli.errors import SystemUnavailable
from tideserve.sim.replay import Replayed

DEPLOYMENT = Deployment(Path("model"), "tiny", Path("cache"), 2, 1 << 28)


def survived() -> Survived:
    return Survived(loss(), loss(), crowd(), outage())


def audited() -> Audited:
    findings = Findings()
    for one in INVARIANTS:
        findings.check(one, True, "")
    return Audited({"worker-0-1-2.jsonl": Replayed(10, 20)}, findings)


def test_a_run_in_which_all_holds_has_no_problem() -> None:
    verdict = judge(survived(), audited())
    assert list(verdict.problems) == []
    assert verdict.figures["apart"]["requests"]["completed"] == 24
    assert verdict.figures["etcd"]["changes_of_groups"] == 0
    rows = dict(verdict.rows)
    assert rows["apart: requests sent / completed"] == "24 / 24"
    assert rows["merged: survivors serve without it after"] == "0.5 s"
    assert rows["merged: of 75% of that before"].endswith("%")
    assert rows["crowded: KV of all requests / of the survivors"] == "2,400 / 300 tokens"
    others = "lost 0, duplicated 0, stuck 0, different 0, refused 0, hung up 1"
    assert rows["etcd: otherwise"] == others


def test_a_problem_says_in_which_part_it_was() -> None:
    bad = Survived(loss([CUT]), loss(whole_s=None), crowd(demand_tokens=9), outage(settled_s=None))
    broken = replace(audited(), findings=Findings())
    problems = list(judge(bad, broken).problems)
    assert problems[:4] == [
        "apart: request 24 is lost after 3 tokens: the server hung up",
        "merged: not all workers serve again",
        "crowded: the survivors have KV for all requests",
        "etcd: not all is well after the outage",
    ]
    assert problems[4:] == [f"nothing in the logs tells of {one}" for one in INVARIANTS]


@pytest.mark.parametrize(("result", "kept"), [(survived(), False), (None, True)])
def test_logs_are_kept_and_told_if_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, result: Survived | None, kept: bool
) -> None:
    target, stopped, said = tmp_path / "kept", [], list[str]()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("a worker's words")
    system = SimpleNamespace(
        state={"logs": str(tmp_path / "logs")},
        start=lambda _say: None,
        stop=lambda: stopped.append(True),
    )

    def made(_: Deployment, workers: int, services: Mapping[str, Any]) -> Any:
        assert workers == survive.WORKERS_MIN
        Path(services["event_log"]).mkdir()
        Path(services["event_log"], "worker-0.jsonl").write_text("{}")
        return system

    bad = replace(survived(), outage=outage(settled_s=None))
    monkeypatch.setattr(survive, "changed_by_hand", made)
    monkeypatch.setattr(survive, "_trouble", lambda *_: result or bad)
    monkeypatch.setattr(survive, "audit_logs", lambda _: audited())
    monkeypatch.setattr(kept_logs, "logs_folder", lambda _: target)
    verdict = survive.run(DEPLOYMENT, LoadChoice(quick=True), said.append, lambda _: None)
    assert stopped == [True]
    assert bool(verdict.problems) is target.exists() is kept
    assert said == ([f"logs: {target}"] if kept else [])
    if kept:
        assert (target / "events" / "worker-0.jsonl").read_text() == "{}"
        assert (target / "logs" / "worker-0.log").read_text() == "a worker's words"


def test_logs_lie_beside_the_file_or_among_temporary_ones(tmp_path: Path) -> None:
    assert logs_folder("faults", tmp_path / "cells.jsonl") == tmp_path / "cells.logs"
    assert logs_folder("faults").name.startswith("tideserve-faults-")


def test_kept_logs_replace_those_of_a_run_before(tmp_path: Path) -> None:
    for name in ("events", "logs", "kept"):
        (tmp_path / name).mkdir()
    (tmp_path / "kept" / "old").touch()
    keep_logs(tmp_path / "events", tmp_path / "logs", tmp_path / "kept")
    assert [one.name for one in (tmp_path / "kept").iterdir()] == ["logs"]


def test_a_cluster_that_does_not_answer_fulfils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: str) -> Any:
        raise SystemUnavailable("no answer")

    system: Any = SimpleNamespace(admin_url="")
    look: Callable[[], bool] = survive._look(system, lambda _: True)
    monkeypatch.setattr(survive, "read_status", silent)
    assert not look()
    monkeypatch.setattr(survive, "read_status", lambda _: {})
    assert look()
