"""Verdict of `survive`, and the logs that are kept of a faulty run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.audit_logs import INVARIANTS
from benchmarks.faults import cluster
from benchmarks.faults.cluster import FaultCluster, logs_folder
from benchmarks.scenarios.survive import judge
from benchmarks.systems.system import Deployment
from services.core.audit.record import Findings
from tests.support.survived import CUT, audited, crowd, loss, outage
from tideserve.cli.errors import SystemUnavailable

PARTS = {"apart": loss(), "merged": loss(), "crowded": crowd(), "etcd": outage()}
DEPLOYMENT = Deployment(Path("model"), "tiny", Path("cache"), 2, 1 << 28)


def test_a_valid_run_has_no_problem() -> None:
    verdict = judge(PARTS, audited())
    assert list(verdict.problems) == []
    assert verdict.figures["apart"]["requests"]["completed"] == 24
    assert verdict.figures["etcd"]["changes_of_groups"] == 0


def test_a_problem_names_its_part() -> None:
    bad = (loss([CUT]), loss(whole_s=None), crowd(demand_tokens=9), outage(settled_s=None))
    parts = dict(zip(PARTS, bad, strict=True))
    problems = list(judge(parts, replace(audited(), findings=Findings())).problems)
    assert problems[:4] == [
        "apart: request 24 is lost after 3 of 10 tokens: the server hung up",
        "merged: not all workers serve again",
        "crowded: the survivors have enough KV for all requests",
        "etcd: the cluster did not settle after the outage",
    ]
    assert problems[4:] == [f"no log entry checks {invariant}" for invariant in INVARIANTS]


@pytest.mark.parametrize("problems", [[], ["a request is lost"]])
def test_logs_of_a_run_with_problems_are_kept_in_place_of_older_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problems: list[str]
) -> None:
    disturbed = FaultCluster(DEPLOYMENT, 2, tmp_path / "run", {})
    state = property(lambda _: {"logs": tmp_path / "logs"})
    monkeypatch.setattr(FaultCluster, "state", state)
    kept, lines = tmp_path / "kept", list[str]()
    monkeypatch.setattr(cluster, "logs_folder", lambda _: kept)
    for file in ("run/events/worker-0.jsonl", "logs/worker-0.log", "kept/old"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    disturbed.keep_if(problems, "survive", lines.append)
    names = {path.name for path in kept.rglob("*") if path.is_file()}
    assert names == ({"worker-0.jsonl", "worker-0.log"} if problems else {"old"})
    assert lines == ([f"logs: {kept}"] if problems else [])


def test_logs_are_stored_beside_the_file_or_in_a_temporary_folder(tmp_path: Path) -> None:
    assert logs_folder("faults", tmp_path / "cells.jsonl") == tmp_path / "cells.logs"
    assert logs_folder("faults").name.startswith("tideserve-faults-")


def test_an_unresponsive_cluster_fails_every_condition(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def silent(_: str) -> Any:
        raise SystemUnavailable("no answer")

    disturbed = FaultCluster(DEPLOYMENT, 2, tmp_path, {})
    monkeypatch.setattr(FaultCluster, "admin_url", "")
    monkeypatch.setattr(cluster, "read_status", silent)
    assert not disturbed.holds(lambda _: True)
    monkeypatch.setattr(cluster, "read_status", lambda _: {})
    assert disturbed.holds(lambda _: True)
