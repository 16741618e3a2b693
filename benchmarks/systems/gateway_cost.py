"""Counters of a cluster's gateway: processor time by the kernel, tokens by its own count."""

import json
from dataclasses import dataclass

import psutil

from benchmarks.systems.system import read_metrics
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import fetch


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
    """What the gateway at `url` has spent since it started. Raises SystemUnavailable."""
    times = psutil.Process(_gateway_pid(admin_url)).cpu_times()
    tokens = read_metrics(url).get("tideserve_gateway_output_tokens_total")
    if tokens is None:
        raise SystemUnavailable(f"{url} does not tell how many tokens it has sent")
    return GatewayCost(times.user + times.system, int(tokens))


def _gateway_pid(url: str) -> int:
    try:
        services = json.loads(fetch(f"{url}/tideserve/v1/status"))["services"]
        (pid,) = [row["pid"] for row in services if row["name"] == "gateway"]
        return int(pid)
    except (OSError, ValueError, KeyError) as error:
        raise SystemUnavailable(f"{url} does not tell its gateway's process") from error
