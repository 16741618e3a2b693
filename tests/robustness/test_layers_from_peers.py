"""A worker of a merged group is killed: layers held by a worker are not read from disk."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.cluster import Cluster
from tests.support.disturbed_streams import check_answers, kill, run_all
from tests.support.exposition import samples
from tests.support.tiny_models import make_tiny_model
from tideserve.cli.groups import drop

PAIRS = (("worker-0", "worker-1"), ("worker-2", "worker-3"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4)
    with Cluster(
        model_dir=folder,
        workers=4,
        memory="32MiB",
        dtype="float64",
        chunk_size="64KiB",
        overload_policy="recompute",  # no automatic changes of groups
        # Workers of a busy machine are slow to connect and to send, which is no reason for the
        # model folder.
        memmgr={"prepare_timeout_s": 600},
    ) as running:
        yield running


def groups(cluster: Cluster) -> list[list[str]]:
    """The members of all groups; empty while any group is changing."""
    rows = cluster.status()["groups"]
    busy = any(row["degraded"] or row["changing"] for row in rows)
    return [] if busy else sorted(row["members"] for row in rows)


def row_of(cluster: Cluster, members: list[str]) -> tuple[str, int]:
    """Id and epoch of the group with these members."""
    rows = cluster.status()["groups"]
    return next((row["id"], row["epoch"]) for row in rows if row["members"] == members)


def restored(cluster: Cluster, worker: str) -> dict[str, float]:
    """Slabs that a worker has restored, by source."""
    targets = json.loads((cluster.folder / "cluster" / "prometheus_targets.json").read_text())
    (address,) = [
        target["targets"][0] for target in targets if target["labels"]["process"] == worker
    ]
    metrics = samples(httpx.get(f"http://{address}/metrics", timeout=10).text)
    return {
        dict(labels)["source"]: count
        for (name, labels), count in metrics.items()
        if name == "tideserve_worker_restored_slabs_total"
    }


@pytest.mark.parametrize("lost", [0, 1], ids=["leader", "follower"])
def test_a_survivor_fetches_its_layers_from_the_other_group(lost: int, cluster: Cluster) -> None:
    alone = [["worker-0"], ["worker-1"], ["worker-2"], ["worker-3"]]
    cluster.eventually(lambda: groups(cluster) == alone, deadline_s=120)
    undisturbed = run_all(cluster)
    for pair in PAIRS:
        drop(cluster.admin_url, None, [f"group-{name}" for name in pair])
    members = cluster.eventually(lambda: groups(cluster))
    other = row_of(cluster, members[1])
    hit: list[str] = []

    def note(tokens: int) -> None:
        if tokens >= 60 and not hit:
            hit.append(members[0][lost])
            kill(cluster, hit[0], engine=False)

    check_answers(run_all(cluster, note), undisturbed)
    (survivor,) = set(members[0]) - set(hit)
    cluster.eventually(lambda: [survivor] in groups(cluster), deadline_s=120)
    assert row_of(cluster, members[1]) == other, "the other group goes on"
    counts = restored(cluster, survivor)
    assert counts["peer"] > 0 and counts["disk"] == 0, counts


def test_survivors_of_one_group_fetch_their_layers_from_each_other(cluster: Cluster) -> None:
    names = [f"worker-{number}" for number in range(4)]
    cluster.eventually(lambda: groups(cluster) == [[name] for name in names], deadline_s=120)
    undisturbed = run_all(cluster)
    drop(cluster.admin_url, None, [f"group-{name}" for name in names])
    ((_, lost, *_),) = cluster.eventually(lambda: groups(cluster))
    survivors = [name for name in names if name != lost]
    before = {name: restored(cluster, name) for name in survivors}
    hit: list[str] = []

    def note(tokens: int) -> None:
        if tokens >= 60 and not hit:
            hit.append(lost)
            kill(cluster, lost, engine=False)

    check_answers(run_all(cluster, note), undisturbed)
    alone = [[name] for name in survivors]
    cluster.eventually(
        lambda: [group for group in groups(cluster) if group in alone] == alone, deadline_s=120
    )
    # A process killed during a write may break a survivor's lane and fetch.
    cut = any("UCX receives nothing any more" in cluster.log(name) for name in survivors)
    for name in survivors:
        counts = {key: n - before[name][key] for key, n in restored(cluster, name).items()}
        assert counts["disk"] + counts["peer"] >= 3 and counts["peer"] >= 1, counts
        assert counts["disk"] <= 1 or cut, counts  # the layer of the lost worker
