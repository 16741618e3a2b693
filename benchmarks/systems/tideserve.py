"""tideserve itself, started with `tideserve up` as a person would."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.systems.gateway_cost import GatewayCost, read_gateway_cost
from benchmarks.systems.process_cost import ProcessCost, read_process_cost
from benchmarks.systems.schedulings import SCHEDULINGS, merged, scheduling_of
from benchmarks.systems.system import (
    AMPLE,
    CPU,
    OUTPUT_METRIC,
    Counters,
    Deployment,
    Say,
    read_metrics,
)
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import LocalCluster

READY_TIMEOUT_S, GPU_READY_TIMEOUT_S = 300.0, 900.0
"""On a GPU, weights of a large model are read, and kernels compiled when they first run."""
BLOCK_TOKENS = 16
# A run has to show waiting, not refusals.
QUEUE_DEADLINE_S = 3600.0
POLICIES: Mapping[str, str] = {
    "tideserve": "the default overload policy, which is `drop`",
    "drop": "drop replicated layers, merge into pipelines, exchange KV, restore (KunServe)",
    "recompute": "preempt the newest request and compute it anew later, as vLLM does",
}
RESTORE_OFF_S = 3600.0
"""A dwell time that is longer than any run."""
MECHANISMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    AMPLE: ("the memory limit off: memory for the whole demand", {}),
    "exchange": (
        "coordination off: KV moves without standing aside for activations",
        {"worker": {"coordinated_exchange": False}},
    ),
    "lookahead": (
        "lookahead off: a pipeline's microbatches are formed by token count",
        {"worker": {"batch_formation": "token_count"}},
    ),
    "restore": (
        "restore off: groups that have merged stay merged",
        {"memmgr": {"split_dwell_s": RESTORE_OFF_S}},
    ),
    "chunking": (
        "chunked prefill off: a prompt of up to 2,048 tokens runs in one iteration",
        {"worker": {"max_batch_tokens": 2048}},
    ),
}
"""What `-mechanism` switches off, and options of `tideserve up` that do it."""
TIMES = {
    "busy_s": "pipeline_busy",
    "bubble_s": "pipeline_bubble",
    "prefill_s": "prefill",
    "prefill_predicted_s": "prefill_predicted",
    "decode_s": "decode",
    "decode_predicted_s": "decode_predicted",
}
"""Fields of `Counters`, by the name of the metric."""
TOKENS = {
    "processed": "tideserve_worker_processed_tokens_total",
    "batch_processed": "tideserve_worker_processed_tokens_total{batch}",
    "recomputed": "tideserve_worker_recomputed_tokens_total",
    "batch_recomputed": "tideserve_worker_recomputed_tokens_total{batch}",
    "output": OUTPUT_METRIC,
}
"""The same."""
TARGETS_FILE = "prometheus_targets.json"


class Tideserve:
    """One cluster in a temporary folder on a free port; a System."""

    def __init__(self, name: str, off: Sequence[str], deployment: Deployment) -> None:
        self.name = name
        self.model = deployment.model_name
        self.api_key: str | None = None
        self.urls: Sequence[str] = ()
        self._off = off
        self._deployment = deployment
        self._cluster: LocalCluster | None = None
        self._capacity_tokens: int | None = None

    @property
    def policy(self) -> str:
        """A key of `POLICIES`."""
        return self.name.split("@")[0].split("-")[0]

    @property
    def _about(self) -> str:
        """What sets it apart, for the report."""
        if (scheduled := scheduling_of(self.name.split("@")[0])) is not None:
            return SCHEDULINGS[scheduled[0]][0]
        return POLICIES[self.policy]

    def options(self) -> dict[str, Any]:
        """Options of `tideserve up`, as its configuration file has them."""
        deployment = self._deployment
        options: dict[str, Any] = {
            "model": str(deployment.model_dir),
            "model_name": deployment.model_name,
            "workers": deployment.workers,
            "memory": deployment.memory_bytes,
            "dtype": deployment.dtype,
            "device": deployment.device,
            "block_size": BLOCK_TOKENS,
            "max_running": deployment.max_running,
            "queue_deadline": QUEUE_DEADLINE_S,
            # A worker that profiles itself while another system is measured would disturb that one.
            "worker": {"profile_when_idle": False},
        }
        if deployment.event_log and self._cluster is not None:
            logging = {"event_log": str(self.event_logs)}
            options = merged(options, {deployment.event_log: logging})
        for mechanism in self._off:
            options = merged(options, MECHANISMS[mechanism][1])
        if AMPLE in self._off:
            options["memory"] = deployment.ample_memory_bytes
        if self.policy == "recompute":
            options["overload_policy"] = "recompute"
        if deployment.paced:
            options["paced"] = deployment.paced
        if deployment.device != CPU:
            options["ready_timeout"] = GPU_READY_TIMEOUT_S
        return merged(options, deployment.options)

    def start(self, say: Say) -> None:
        say(f"{self.name}: starting a cluster of {self._deployment.workers} workers")
        self._cluster = LocalCluster()
        options = self.options()
        self._cluster.start(options, float(options.get("ready_timeout", READY_TIMEOUT_S)))
        self.urls = (self._cluster.url,)
        self.cost_at_start = self.gateway_cost()
        # Capacity before any merge: demand is reported as a multiple of it.
        blocks = self.metrics().get("tideserve_worker_kv_blocks_total")
        self._capacity_tokens = int(blocks) * self._block_tokens if blocks else None

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None

    def rest(self) -> bool:
        """See System; leases would run out, and a start takes seconds."""
        return False

    def wake(self) -> None:
        """See System; it never rests."""

    @property
    def cluster(self) -> LocalCluster:
        """The cluster while it runs."""
        assert self._cluster is not None
        return self._cluster

    @property
    def admin_url(self) -> str:
        """The operators' address while it runs."""
        return self.cluster.admin_url

    @property
    def state(self) -> Mapping[str, Any]:
        """The state file of `tideserve up` while it runs."""
        return self.cluster.state

    def gateway_cost(self) -> GatewayCost:
        """What its gateway has spent since it started. Raises SystemUnavailable."""
        return read_gateway_cost(self.urls[0], self.admin_url)

    def process_cost(self) -> ProcessCost:
        """What all processes of the cluster have spent since they began."""
        return read_process_cost([self.cluster.pid])

    @property
    def targets(self) -> Path:
        """The file that tells Prometheus where its processes are, while it runs."""
        return self.cluster.folder / "cluster" / TARGETS_FILE

    @property
    def event_logs(self) -> Path:
        """Folder of the event logs while it runs, if there are any."""
        return self.cluster.folder / "events"

    def metrics(self) -> dict[str, float]:
        """The cluster's metrics, summed over its processes; none of one that does not answer."""
        totals: dict[str, float] = {}
        for address in metrics_addresses(self.targets):
            for name, value in read_metrics(f"http://{address}").items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def counters(self) -> Counters:
        metrics = self.metrics()
        blocks = metrics.get("tideserve_worker_kv_blocks_total")
        preemptions = metrics.get("vllm:num_preemptions_total")
        if not blocks or preemptions is None:
            return Counters()
        return Counters(
            int(preemptions),
            self._capacity_tokens,
            int(metrics.get("tideserve_memmgr_usable_kv_blocks", blocks)) * self._block_tokens,
            **{
                field: metrics.get(f"tideserve_worker_{name}_seconds_total")
                for field, name in TIMES.items()
            },
            **{field: metrics.get(name) for field, name in TOKENS.items()},
        )

    @property
    def _block_tokens(self) -> int:
        return int(self.options()["block_size"])

    def kv_bytes_per_worker(self) -> int:
        """KV cache that each worker has. Raises SystemUnavailable if it does not tell."""
        capacity = self.counters().capacity_tokens
        if capacity is None:
            raise SystemUnavailable(f"{self.name} does not tell the size of its KV cache")
        return capacity * self._deployment.kv_bytes_per_token // self._deployment.workers

    def describe(self) -> Mapping[str, Any]:
        paced, options = self._deployment.paced, self.options()
        # Results are published, so the paths of models and logs are left out.
        options["model"] = self._deployment.model_name
        options.get(self._deployment.event_log, {}).pop("event_log", None)
        return {
            "kind": "tideserve",
            "policy": self._about,
            "dtype": options["dtype"],
            "switched_off": list(self._off),
            "options": options,
            "paced": paced,
            "kv_capacity_tokens": self.counters().capacity_tokens,
        }


def metrics_addresses(path: Path) -> list[str]:
    """host:port of the processes' metrics, from the file for Prometheus; none without it."""
    try:
        return [address for group in json.loads(path.read_text()) for address in group["targets"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
