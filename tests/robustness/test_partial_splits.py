"""A merged group of four splits into 2+2 and then into single workers while requests run."""

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import httpx
import pytest

from benchmarks.audit_logs import audit_logs
from services.gateway.admin.guard import ADMIN_HEADER
from tests.support.cluster import Cluster
from tests.support.disturbed_streams import check_answers, run_all
from tests.support.tiny_models import make_tiny_model

WORKERS = 4


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def cluster(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4)
    with Cluster(
        model_dir=folder,
        workers=WORKERS,
        memory="32MiB",
        dtype="float64",
        services={"event_log": str(logs)},
        chunk_size="64KiB",
        # No automatic changes of groups.
        overload_policy="recompute",
        memmgr={"split_dwell_s": 3600},
    ) as running:
        yield running


def change(cluster: Cluster, action: str) -> str:
    """Merge or split groups; returns the reported steps."""
    url = f"{cluster.admin_url}/tideserve/v1/groups/{action}"
    return httpx.post(url, headers={ADMIN_HEADER: "1"}, timeout=120).text


def sizes(cluster: Cluster) -> list[int]:
    return sorted(len(group["members"]) for group in cluster.status()["groups"])


def test_splits_into_smaller_groups_change_no_output(cluster: Cluster, logs: Path) -> None:
    undisturbed = run_all(cluster)
    assert '"stable"' in change(cluster, "merge") and sizes(cluster) == [4]
    obstacles = cluster.status()["split_obstacles"]
    assert list(obstacles) == [group["id"] for group in cluster.status()["groups"]]
    refused = change(cluster, "split?parts=5")
    assert "cannot split into 5 groups; name 2 to 4" in refused
    steps: list[str] = []

    def halve() -> None:
        steps.append(change(cluster, "split?parts=2"))
        steps.append(str(sizes(cluster)))

    halving = Thread(target=halve)

    def note(tokens: int) -> None:
        if tokens >= 60 and halving.ident is None:
            halving.start()

    check_answers(run_all(cluster, note), undisturbed)
    halving.join()
    assert '"stable"' in steps[0] and "splits into 2+2" in steps[0] and steps[1] == "[2, 2]"
    decision = cluster.status()["decisions"][-1]
    assert (decision["cause"], decision["parts"]) == ("manual", [2])
    for group in cluster.status()["groups"]:
        assert '"stable"' in change(cluster, f"split?group={group['id']}")
    assert sizes(cluster) == [1] * WORKERS
    check_answers(run_all(cluster), undisturbed)
    cluster.eventually(lambda: all(not row["running"] for row in cluster.workers()))
    findings = audit_logs(logs).findings
    assert findings.violations == []
    assert findings.checks["I4"] > 0 and findings.checks["I5"] > 0
