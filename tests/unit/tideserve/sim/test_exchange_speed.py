"""KV moves after a merge take about the transfer time of their bytes."""

from pathlib import Path

import pytest

from tideserve.cli.simulation_options import read_simulation
from tideserve.sim.cluster import Cluster

FLOOD = """
instances: 2
duration_s: 30
profile: A100-14B
overload_policy: [drop]
queue_limit: 100000
queue_deadline_s: 3600
lateness: 0
max_running: 1024
seed: {seed}
workload:
  kind: burst
  rate_per_s: 9
  burst_rate_per_s: 20
  start_s: 5
  end_s: 25
  prompt: {{mean: 1660, cv: 1.0, most: 4000}}
  output: {{mean: 373, cv: 1.0, most: 2000}}
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_full_workers_exchange_their_kv_in_two_seconds(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "flood.yaml"
    path.write_text(FLOOD.format(seed=seed))
    plan = read_simulation(path, None)
    spec, workload = plan.systems["drop"]
    merge = Cluster(spec, plan.time_model, workload).run().changes.changes[0]
    assert merge.is_merge and merge.moved_bytes > 15e9
    assert merge.settled_s is not None
    assert merge.settled_s - merge.committed_s < 2.0
