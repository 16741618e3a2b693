"""`doors`: what a request and a token cost the gateway over HTTP and over gRPC.

One cluster of one worker takes the same requests over both doors in turn, in pairs; which door is
first alternates. There are two loads, of short answers and of long ones, so that the cost of a
request can be separated from that of a token. Processor time is what the kernel counts for the
gateway's process, all of its threads, less the time of an idle gateway; tokens are what the gateway
counts. Requests are prompts of token ids, so no text is tokenised.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.client_process import run_answered
from benchmarks.scenarios.scenario import LoadChoice, Trial, TrialVerdict
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import free_port
from tideserve.load.client import Job
from tideserve.load.grpc_door import SCHEME
from tideserve.load.workload import fixed

HTTP, GRPC = "http", "grpc"
PAIRS, QUICK_PAIRS = 10, 4
PROMPT_TOKENS, CONCURRENCY = 32, 16
SHORT, LONG = 4, 64
"""Output tokens."""
REQUESTS: Mapping[int, int] = {SHORT: 400, LONG: 100}
IDLE_S = 5.0
ROUND_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class DoorCost:
    """Cost of one load over one door: processor time less that of an idle gateway, in seconds."""

    cpu_s: float
    requests: int
    tokens: int
    ttft_s: float
    """The median."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a request costs the gateway before its first token, and what each token, in seconds."""

    request_s: float
    token_s: float


def prices(short: DoorCost, long: DoorCost) -> Prices:
    """Two loads, two unknowns; `long` has more tokens a request."""
    short_length, long_length = short.tokens / short.requests, long.tokens / long.requests
    short_s, long_s = short.cpu_s / short.requests, long.cpu_s / long.requests
    token_s = (long_s - short_s) / (long_length - short_length)
    return Prices(short_s - short_length * token_s, token_s)


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start the cluster, measure both doors, compare."""
    pairs = QUICK_PAIRS if choice.quick else PAIRS
    port = free_port()
    # More threads of the worker would spend their time waiting for each other.
    options = dict(deployment.options) | {"grpc_port": port, "threads": 1}
    system = Tideserve("tideserve", (), replace(deployment, workers=1, options=options))
    costs: dict[str, dict[int, list[DoorCost]]] = {
        door: {SHORT: [], LONG: []} for door in (HTTP, GRPC)
    }
    try:
        system.start(say)
        urls = {HTTP: system.urls[0], GRPC: f"{SCHEME}://127.0.0.1:{port}"}
        for url in urls.values():  # modules that load at the first request do not count
            _measure(system, url, SHORT, -1, 0.0)
        idle_share = _idle_share(system)
        for number in range(pairs):
            progress(f"pair {number + 1} of {pairs}")
            for length in (SHORT, LONG):
                seed = choice.seed * 1000 + number
                for door in sorted(urls, reverse=bool(number % 2)):
                    one = _measure(system, urls[door], length, seed, idle_share)
                    costs[door][length].append(one)
    finally:
        system.stop()
    return judge(costs, idle_share)


def judge(costs: Mapping[str, Mapping[int, Sequence[DoorCost]]], idle_share: float) -> TrialVerdict:
    """Figures for people. The trial only compares: no cost makes it fail."""
    found = {
        door: [prices(short, long) for short, long in zip(by[SHORT], by[LONG], strict=True)]
        for door, by in costs.items()
    }
    figures: dict[str, Any] = {
        "pairs": len(found[HTTP]),
        "load": f"{PROMPT_TOKENS} prompt tokens, {SHORT} and {LONG} output tokens,"
        f" {CONCURRENCY} at once",
        "idle_share_of_a_processor": idle_share,
    }
    rows = []
    for door, by in costs.items():
        request_s = median(one.request_s for one in found[door])
        token_s = median(one.token_s for one in found[door])
        thousand = {
            str(length): median(1e3 * one.cpu_s / one.tokens for one in each)
            for length, each in by.items()
        }
        ttft_s = {str(length): median(one.ttft_s for one in each) for length, each in by.items()}
        figures[door] = {
            "cpu_s_per_request": [one.request_s for one in found[door]],
            "cpu_s_per_token": [one.token_s for one in found[door]],
            "cpu_s_per_1000_tokens_by_length": thousand,
            "ttft_s_by_length": ttft_s,
        }
        told = f"{1e3 * request_s:.2f} ms of the gateway for a request and {1e6 * token_s:.0f} µs"
        told += f" for each token; median TTFT {1e3 * ttft_s[str(SHORT)]:.0f} ms"
        rows.append((door, told))
    ratios = {
        "request": _ratio([one.request_s for one in found[GRPC]], found[HTTP], "request_s"),
        "token": _ratio([one.token_s for one in found[GRPC]], found[HTTP], "token_s"),
    }
    figures["grpc_over_http"] = ratios
    rows.append(
        ("grpc over http", ", ".join(f"{one:.2f} for a {name}" for name, one in ratios.items()))
    )
    return TrialVerdict(figures, rows, [])


def _ratio(above: Sequence[float], below: Sequence[Prices], name: str) -> float:
    """The median of the pairs'."""
    return median(one / getattr(other, name) for one, other in zip(above, below, strict=True))


def _measure(system: Tideserve, url: str, length: int, seed: int, idle_share: float) -> DoorCost:
    """One load over one door. Raises SystemUnavailable if a request fails."""
    count = REQUESTS[length]
    job = Job(
        urls=(url,),
        model=system.model,
        requests=fixed(count, PROMPT_TOKENS, length, seed).requests,
        timeout_s=ROUND_TIMEOUT_S,
        concurrency=CONCURRENCY,
    )
    before, begun_s = system.gateway_cost(), time.monotonic()
    records = run_answered(job)
    spent, took_s = system.gateway_cost().since(before), time.monotonic() - begun_s
    if lacking := count - len(records):
        raise SystemUnavailable(f"{lacking} requests over {url} did not fit into the time")
    first_s = median(one.token_times_s[0] - one.sent_s for one in records)
    return DoorCost(spent.cpu_s - idle_share * took_s, count, spent.tokens, first_s)


def _idle_share(system: Tideserve) -> float:
    """Processors that an idle gateway uses."""
    before, begun_s = system.gateway_cost(), time.monotonic()
    time.sleep(IDLE_S)
    return (system.gateway_cost().cpu_s - before.cpu_s) / (time.monotonic() - begun_s)


TRIAL = Trial(
    name="doors",
    summary="processor time of the gateway for a request and for a token, over HTTP and over gRPC",
    memory="128MiB",
    run=run,
)
