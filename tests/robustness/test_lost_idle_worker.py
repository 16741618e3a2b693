"""A member of an idle merged group is killed while the workers profile themselves."""

import time
from pathlib import Path

from services.worker.engine.profile.idle import MIN_IDLE_S
from tests.support.cluster import Cluster
from tests.support.disturbed_streams import apart, kill, merge
from tests.support.tiny_models import make_tiny_model


def test_an_idle_survivor_restores_its_layers(tmp_path: Path) -> None:
    # Large enough that profiles are unfinished when the member is killed.
    folder = make_tiny_model(tmp_path / "model", seed=3, layers=8, hidden=512, heads=8)
    with Cluster(
        model_dir=folder,
        memory="256MiB",
        chunk_size="64KiB",
        overload_policy="recompute",  # no automatic changes of groups
        environment={"TIDESERVE_CACHE": str(tmp_path / "cache")},
        worker={"profile_when_idle": True},
    ) as cluster:
        survivor, lost = merge(cluster)
        before = cluster.pids()[survivor]
        assert "this worker profiles while idle" in cluster.log(survivor)
        time.sleep(1.5 * MIN_IDLE_S)  # the profilers of both workers measure whenever allowed
        kill(cluster, lost, engine=False)
        cluster.eventually(lambda: "has lost" in cluster.log(survivor), deadline_s=120)
        cluster.eventually(lambda: apart(cluster), deadline_s=120)
        assert cluster.pids()[survivor] == before
        assert "InvalidBatch" not in cluster.log(survivor)
