"""Counters of a cluster's gateway: CPU time from the kernel, tokens from its metrics."""

from dataclasses import dataclass

import psutil

from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import read_metrics
from tideserve.cli.errors import SystemUnavailable


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """CPU time of all threads of a gateway, and its output tokens."""

    cpu_s: float
    tokens: int

    @property
    def per_thousand_s(self) -> float:
        """CPU seconds per 1,000 output tokens."""
        return 1e3 * self.cpu_s / self.tokens

    def since(self, earlier: "GatewayCost") -> "GatewayCost":
        """The cost since `earlier`."""
        return GatewayCost(self.cpu_s - earlier.cpu_s, self.tokens - earlier.tokens)


def read_gateway_cost(url: str, admin_url: str) -> GatewayCost:
    """Read the cost of the gateway at `url` since its start. Raises SystemUnavailable."""
    services = read_status(admin_url).get("services", ())
    pids = [int(row["pid"]) for row in services if row["name"] == "gateway"]
    if len(pids) != 1:
        raise SystemUnavailable(f"{admin_url} does not report its gateway's process")
    times = psutil.Process(pids[0]).cpu_times()
    tokens = read_metrics(url).get("tideserve_gateway_output_tokens_total")
    if tokens is None:
        raise SystemUnavailable(f"{url} does not report the number of sent tokens")
    return GatewayCost(times.user + times.system, int(tokens))
