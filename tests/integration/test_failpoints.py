"""The failpoints of a cluster: each service passes those listed for it in docs/faults.md."""

from pathlib import Path

from benchmarks.faults.load import Streams
from benchmarks.group_changes import MERGE_PATH, change_groups
from services.common.failpoint import read_hits
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tideserve.load.workload import PlannedRequest

CHANGE_TIMEOUT_S = 60.0
MEMMGR = [
    *("memmgr.mark.sent", "memmgr.mark.applied", "memmgr.prepare.sent"),
    *("memmgr.prepare.answered", "memmgr.commit.sent", "memmgr.commit.applied"),
]
SERVICER = [
    *("worker.prepare.accepted", "worker.prepare.engine_ready", "worker.commit.seen"),
    *("worker.apply.sent", "worker.moved.reported", "worker.attach.taken"),
]
GATEWAY = [
    *("gateway.assigned", "gateway.started", "gateway.token", "gateway.moved.before_attach"),
    "gateway.attach.sent",
]
FOLLOWER = [
    *(f"engine.merge.{place}.follower" for place in ("prepare", "ready", "commit", "switch")),
    *(f"engine.merge.{place}.follower" for place in ("mapped", "joined", "adopt", "all_adopted")),
]


def test_a_merge_under_load_passes_the_failpoints_of_all_services(tmp_path: Path) -> None:
    hits = tmp_path / "hits.jsonl"
    names = [*MEMMGR, *SERVICER, *GATEWAY, *FOLLOWER]
    armed = [f"{name}=note" for name in (*names, "memmgr.settle.sent", "gateway.resumed")]
    with Cluster(
        model_dir=make_tiny_model(tmp_path / "model", seed=3, layers=4),
        dtype="float64",
        chunk_size="64KiB",
        overload_policy="recompute",  # no automatic changes of groups
        services={"failpoints": armed, "failpoint_file": str(hits)},
    ) as cluster:
        model = cluster.get("/v1/models")["data"][0]["id"]
        requests = [
            # Long enough that none ends before the merge, even on a busy machine.
            PlannedRequest(0.0, tuple(range(3 + number, 30 + number)), 1200, number)
            for number in range(8)
        ]
        streams = Streams(cluster.url, model, requests, "salt")
        streams.start()
        cluster.eventually(lambda: streams.begun == 8)
        cluster.eventually(lambda: all(row["running"] for row in cluster.workers()))
        change_groups(cluster.admin_url, MERGE_PATH, CHANGE_TIMEOUT_S)
        outcomes = streams.wait()
        pids = {hit["name"]: hit["pid"] for hit in read_hits(hits)}
        running = cluster.pids()
        engines = {row["pids"][1] for row in cluster.workers()}
    assert all(outcome.finished for outcome in outcomes)
    assert sorted(pids) == sorted(names), "no process was lost, so nothing was resumed"
    assert {pids[name] for name in MEMMGR} == {running["memmgr"]}
    assert {pids[name] for name in GATEWAY} == {running["gateway"]}
    assert {pids[name] for name in SERVICER} <= {running["worker-0"], running["worker-1"]}
    assert {pids[name] for name in FOLLOWER} < engines
