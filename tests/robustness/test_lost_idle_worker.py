"""A member of an idle merged group is killed while the workers profile themselves."""

from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.disturbed_streams import apart, kill, merge
from tests.support.tiny_models import make_tiny_model


def test_an_idle_survivor_restores_its_layers(tmp_path: Path) -> None:
    with Cluster(
        model_dir=make_tiny_model(tmp_path / "model", seed=3, layers=4),
        memory="32MiB",
        chunk_size="64KiB",
        overload_policy="recompute",  # groups change by hand only
        environment={"TIDESERVE_CACHE": str(tmp_path / "cache")},
        worker={"profile_when_idle": True},
    ) as cluster:
        survivor, lost = merge(cluster)
        before = cluster.pids()[survivor]
        assert "this worker profiles while idle" in cluster.log(survivor)
        kill(cluster, lost, engine=False)
        cluster.eventually(lambda: "has lost" in cluster.log(survivor), deadline_s=120)
        cluster.eventually(lambda: apart(cluster), deadline_s=120)
        assert cluster.pids()[survivor] == before
        assert "InvalidBatch" not in cluster.log(survivor)
