"""Counters of a cluster's gateway: processor time by the kernel, tokens by its own count."""

from dataclasses import dataclass

import psutil

from benchmarks.systems.cluster_status import read_status
from benchmarks.systems.system import read_metrics
from tideserve.cli.errors import SystemUnavailable


@dataclass(frozen=True, slots=True)
class GatewayCost:
    """Processor time of a gateway, all of its threads, for a load."""

    cpu_s: float
    tokens: int

    @property
    def per_thousand_s(self) -> float:
        """For 1,000 output tokens."""
        return 1e3 * self.cpu_s / self.tokens

    def since(self, earlier: "GatewayCost") -> "GatewayCost":
        """What was spent since `earlier`."""
        return GatewayCost(self.cpu_s - earlier.cpu_s, self.tokens - earlier.tokens)


def read_gateway_cost(url: str, admin_url: str) -> GatewayCost:
    """The cost of the gateway at `url` since it started. Raises SystemUnavailable."""
    services = read_status(admin_url).get("services", ())
    pids = [int(row["pid"]) for row in services if row["name"] == "gateway"]
    if len(pids) != 1:
        raise SystemUnavailable(f"{admin_url} does not report its gateway's process")
    times = psutil.Process(pids[0]).cpu_times()
    tokens = read_metrics(url).get("tideserve_gateway_output_tokens_total")
    if tokens is None:
        raise SystemUnavailable(f"{url} does not report how many tokens it has sent")
    return GatewayCost(times.user + times.system, int(tokens))
