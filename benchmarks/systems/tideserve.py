"""tideserve, started with `tideserve up`."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.gateway_cost import GatewayCost, read_gateway_cost
from benchmarks.systems.process_cost import ProcessCost, read_process_cost
from benchmarks.systems.schedulings import (
    HOST_MEMORY,
    SCHEDULINGS,
    merged,
    prefixed,
    scheduling_of,
)
from benchmarks.systems.system import (
    AMPLE,
    CPU,
    OUTPUT_METRIC,
    Counters,
    Deployment,
    Say,
    read_metrics,
)
from services.common.clock import monotonic_s
from services.core.overload.events import OverloadPolicy
from services.core.overload.static_pipelines import MEMBERS as PIPELINE
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import LocalCluster

READY_TIMEOUT_S, GPU_READY_TIMEOUT_S = 300.0, 900.0
"""On a GPU, a start reads the weights of a large model and compiles kernels."""
PIPELINES_TIMEOUT_S, SETTLE_S = 60.0, 0.5
BLOCK_TOKENS = 16
# Let requests wait instead of being refused.
QUEUE_DEADLINE_S = 3600.0
POLICIES: Mapping[str, str] = {
    "tideserve": "the default overload policy, which is `drop`",
    "drop": "drop replicated layers, merge into pipelines, exchange KV, restore (KunServe)",
    "recompute": "preempt the newest request and recompute it later, as in vLLM",
    "static-pipeline": "drop half of the layers at start, pipelines of two that never split",
    "swap": "recompute, with the KV of all requests copied to host memory (InferCept)",
    "migrate": "move running requests with their KV to workers with room (Llumnix)",
}
OPTIONAL_POLICIES = tuple(policy for policy in OverloadPolicy if policy is not OverloadPolicy.DROP)
RESTORE_OFF_S = 3600.0
"""A dwell time longer than any run."""
MECHANISMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    AMPLE: ("memory limit off: memory for the whole demand", {}),
    "exchange": (
        "coordination off: KV transfers do not yield to activations",
        {"worker": {"coordinated_exchange": False}},
    ),
    "lookahead": (
        "lookahead off: microbatches of a pipeline are formed by token count",
        {"worker": {"batch_formation": "token_count"}},
    ),
    "restore": (
        "restore off: merged groups stay merged",
        {"memmgr": {"split_dwell_s": RESTORE_OFF_S}},
    ),
    "moves": (
        "moves off: workers merge without trying to move requests first",
        {"memmgr": {"rebalance": "off"}},
    ),
    "chunking": (
        "chunked prefill off: a prompt of up to 2,048 tokens runs in one iteration",
        {"worker": {"max_batch_tokens": 2048}},
    ),
}
"""Description of each `-mechanism`, and the options of `tideserve up` that disable it."""
TIMES = {
    "busy_s": "pipeline_busy",
    "bubble_s": "pipeline_bubble",
    "prefill_s": "prefill",
    "prefill_predicted_s": "prefill_predicted",
    "decode_s": "decode",
    "decode_predicted_s": "decode_predicted",
}
"""Fields of `Counters` by metric name."""
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
    """A cluster in a temporary folder on a free port; a System."""

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
        """The key of `POLICIES`."""
        policy, _ = prefixed(self.name.split("@")[0], POLICIES) or ("tideserve", ())
        return policy

    @property
    def _about(self) -> str:
        """Description of the differences, for the report."""
        if (scheduled := scheduling_of(self.name.split("@")[0])) is not None:
            return SCHEDULINGS[scheduled[0]][0]
        return POLICIES[self.policy]

    def options(self) -> dict[str, Any]:
        """Options of `tideserve up` as in its configuration file."""
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
            # Every request is served, however long it waits.
            "scheduler": {"lateness": 0.0},
            # A worker that profiles itself would disturb the measurement of another system.
            "worker": {"profile_when_idle": False},
        }
        if deployment.event_log and self._cluster is not None:
            logging = {"event_log": str(self.event_logs)}
            options = merged(options, {deployment.event_log: logging})
        for mechanism in self._off:
            options = merged(options, MECHANISMS[mechanism][1])
        if AMPLE in self._off:
            options["memory"] = deployment.ample_memory_bytes
        if self.policy in OPTIONAL_POLICIES:
            options["overload_policy"] = self.policy
        if self.policy == OverloadPolicy.SWAP:
            options["host_memory"] = HOST_MEMORY
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
        # The capacity before any merge: demand is reported as a multiple of it.
        if self.policy == OverloadPolicy.STATIC_PIPELINE:
            self._capacity_tokens = self._await_pipelines()
            return
        blocks = self.metrics().get("tideserve_worker_kv_blocks_total")
        self._capacity_tokens = int(blocks) * self._block_tokens if blocks else None

    def _await_pipelines(self) -> int:
        """Wait until workers are merged in pairs; returns their KV capacity in tokens before that.

        Raises SystemUnavailable.
        """

        def merged() -> bool:
            groups = read_status(self.admin_url)["groups"]
            single = sum(len(group["members"]) < PIPELINE for group in groups)
            return single < PIPELINE and not any(group["changing"] for group in groups)

        deadline_s = monotonic_s() + PIPELINES_TIMEOUT_S
        while not merged():
            if monotonic_s() > deadline_s:
                raise SystemUnavailable(f"the workers of {self.name} are not merged in pairs")
            time.sleep(SETTLE_S)
        time.sleep(SETTLE_S)
        decisions = read_status(self.admin_url)["decisions"]
        return max(int(decision["undropped_tokens"]) for decision in decisions)

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None

    def rest(self) -> bool:
        """See System; always False, since leases would expire and a start takes only seconds."""
        return False

    def wake(self) -> None:
        """See System; never suspended."""

    @property
    def cluster(self) -> LocalCluster:
        """The cluster, while running."""
        assert self._cluster is not None
        return self._cluster

    @property
    def admin_url(self) -> str:
        """URL of the admin port, while running."""
        return self.cluster.admin_url

    @property
    def state(self) -> Mapping[str, Any]:
        """The state file of `tideserve up`, while running."""
        return self.cluster.state

    def gateway_cost(self) -> GatewayCost:
        """Cost of the gateway since its start. Raises SystemUnavailable."""
        return read_gateway_cost(self.urls[0], self.admin_url)

    def process_cost(self) -> ProcessCost:
        """CPU time of all processes of the cluster since their start."""
        return read_process_cost([self.cluster.pid])

    @property
    def targets(self) -> Path:
        """The file of Prometheus targets, while running."""
        return self.cluster.folder / "cluster" / TARGETS_FILE

    @property
    def event_logs(self) -> Path:
        """Folder of the event logs, while running with event logs."""
        return self.cluster.folder / "events"

    def metrics(self) -> dict[str, float]:
        """The cluster's metrics, summed over the processes that answer."""
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
        """KV cache bytes per worker. Raises SystemUnavailable if unknown."""
        capacity = self.counters().capacity_tokens
        if capacity is None:
            raise SystemUnavailable(f"{self.name} does not report the size of its KV cache")
        return capacity * self._deployment.kv_bytes_per_token // self._deployment.workers

    def describe(self) -> Mapping[str, Any]:
        paced, options = self._deployment.paced, self.options()
        # Leave out the paths of models and logs, since results are published.
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
    """host:port of the processes' metrics, from the Prometheus targets; empty without the file."""
    try:
        return [address for group in json.loads(path.read_text()) for address in group["targets"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
