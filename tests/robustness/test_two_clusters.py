"""Two clusters started simultaneously with a shared etcd: one serves, the other is refused."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.cluster import READY_TIMEOUT_S, Cluster
from tests.support.etcd_server import running_etcd
from tests.support.tiny_models import make_tiny_model
from tideserve.cli.errors import EXIT_UNUSABLE

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_only_one_of_two_clusters_starts(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=5)
    with running_etcd() as etcd:
        clusters = [
            Cluster(model_dir=model, memory="32MiB", workers=1, etcd=etcd.url) for _ in range(2)
        ]
        try:
            for cluster in clusters:
                cluster.start()

            def refused() -> list[Cluster]:
                return [cluster for cluster in clusters if not cluster.running]

            (second,) = clusters[0].eventually(refused, READY_TIMEOUT_S)
            assert second.wait() == EXIT_UNUSABLE, second.output()
            refusal = r"another cluster (is being started with|uses) the etcd at"
            assert re.search(refusal, second.output())
            (first,) = (cluster for cluster in clusters if cluster is not second)
            first.wait_until_ready()
            assert [row["id"] for row in first.workers()] == ["worker-0"]
        finally:
            for cluster in clusters:
                cluster.stop()
                cluster.kill_all()
                shutil.rmtree(cluster.folder)
