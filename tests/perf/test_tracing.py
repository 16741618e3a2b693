"""Processor time of the gateway with 1 % of the requests traced.

Two clusters of one worker, equal except for tracing, serve their halves of one load at the same
time,
so that other work of the machine disturbs both alike. Processor time is the kernel's count for the
gateway's process, tokens are the gateway's count. Answers are short: tracing costs by the request.
"""

from pathlib import Path
from statistics import mean, stdev

import pytest

from tests.perf.measuring import send_over_http, show, started, tiny_cluster
from tests.support.otlp_receiver import OtlpReceiver
from tideserve.load.workload import fixed

PAIRS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 10, 200, 32, 32
SAMPLE_RATIO, COST_MAX = 0.01, 0.02


@pytest.mark.timeout(1800)
def test_tracing_costs_little(tmp_path: Path) -> None:
    receiver = OtlpReceiver()
    traced = {"otlp_endpoint": receiver.endpoint, "trace_sample_ratio": SAMPLE_RATIO}
    systems = {
        "off": tiny_cluster(tmp_path / "off"),
        "on": tiny_cluster(tmp_path / "on", gateway=traced),
    }
    per_token_s: dict[str, list[float]] = {name: [] for name in systems}

    def serve(turn: int) -> None:
        before = {name: system.gateway_cost() for name, system in systems.items()}
        in_turn = list(systems.values())[:: -1 if turn % 2 else 1]
        send_over_http(in_turn, fixed(REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS, turn).requests)
        for name, system in systems.items():
            cost = system.gateway_cost().since(before[name])
            per_token_s[name].append(cost.cpu_s / cost.tokens)

    # The receiver's threads begin only when the clusters have started.
    with started(systems.values()), receiver:
        for turn in range(-1, PAIRS):
            serve(turn)
    off, on = (per_token_s[name][1:] for name in ("off", "on"))  # the first round loads modules
    costs = [more / less - 1 for less, more in zip(off, on, strict=True)]
    cost, error = mean(costs), stdev(costs) / PAIRS**0.5
    rows = {
        f"tracing {name}": f"{1e6 * mean(each):.1f} µs for a token"
        for name, each in (("off", off), ("on", on))
    }
    rows["cost"] = f"{cost:+.2%} ± {error:.2%} (at most {COST_MAX:.0%})"
    rows["spans received"] = f"{len(receiver.all_spans):,}"
    show("processor time of the gateway", rows)
    assert receiver.all_spans, "no trace arrived"
    assert cost <= COST_MAX
