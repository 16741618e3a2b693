"""`tracing`: what 1 % of requests in traces costs the gateway, in processor time.

Two clusters of one worker, alike but for tracing, take their halves of one load at the same time:
the machine's speed and its other work affect both clusters of a pair alike. There are ten pairs;
which cluster is named first alternates. Processor time is what the kernel counts for the gateway's
process, all of its threads; tokens are what the gateway counts. Answers are short, since tracing
costs by the request.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import mean, median, stdev
from typing import Any

import grpc

from benchmarks.client_process import run_answered
from benchmarks.scenarios.scenario import LoadChoice, Trial, TrialVerdict
from benchmarks.systems.gateway_cost import GatewayCost
from benchmarks.systems.system import Deployment, Say
from benchmarks.systems.tideserve import Tideserve
from tideserve.cli.local_cluster import free_port
from tideserve.load.client import Job
from tideserve.load.workload import fixed

PAIRS = 10
SAMPLE_RATIO = 0.01
COST_MAX = 0.02
"""Allowed share of the processor time for 1,000 tokens."""
PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENCY = 32, 32, 16
REQUESTS, QUICK_REQUESTS = 800, 200
ROUND_TIMEOUT_S = 120.0
OFF, ON = "off", "on"
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class Collector:
    """Takes traces and counts their bytes; what is in them is not looked at here."""

    def __init__(self) -> None:
        self.exports = 0
        self.received_bytes = 0

    @contextmanager
    def serving(self, port: int) -> Iterator[None]:
        """Listen meanwhile."""
        export: grpc.RpcMethodHandler[bytes, bytes]
        export = grpc.unary_unary_rpc_method_handler(self._export)
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Export": export}),)
        )
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield
        finally:
            server.stop(None)

    def _export(self, request: bytes, context: object) -> bytes:
        self.exports += 1
        self.received_bytes += len(request)
        return b""


def run(deployment: Deployment, choice: LoadChoice, say: Say, progress: Say) -> TrialVerdict:
    """Start both clusters, measure, compare."""
    count = QUICK_REQUESTS if choice.quick else REQUESTS
    collector = Collector()
    costs: dict[str, list[GatewayCost]] = {OFF: [], ON: []}
    port = free_port()
    traced = {"otlp_endpoint": f"http://127.0.0.1:{port}", "trace_sample_ratio": SAMPLE_RATIO}
    with ExitStack() as stack:
        systems = {OFF: _cluster(deployment, {}), ON: _cluster(deployment, traced)}
        for system in systems.values():
            stack.callback(system.stop)
            system.start(say)
        # Only now: no thread may run while a server is started.
        stack.enter_context(collector.serving(port))
        _pair(systems, QUICK_REQUESTS, -1)  # modules that load at the first request do not count
        for number in range(PAIRS):
            progress(f"pair {number + 1} of {PAIRS}")
            for name, cost in _pair(systems, count, choice.seed * 1000 + number).items():
                costs[name].append(cost)
    return judge(costs, collector)


def judge(costs: Mapping[str, Sequence[GatewayCost]], collector: Collector) -> TrialVerdict:
    """Figures; a problem if tracing costs more than allowed, or if nothing was traced."""
    per = {name: [one.per_thousand_s for one in rounds] for name, rounds in costs.items()}
    ratios = [on / off - 1 for off, on in zip(per[OFF], per[ON], strict=True)]
    cost, spread = mean(ratios), stdev(ratios) / len(ratios) ** 0.5
    figures = {
        "pairs": len(ratios),
        "sample_ratio": SAMPLE_RATIO,
        "load": f"{PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens, {CONCURRENCY} at once",
        "tokens": {name: [one.tokens for one in rounds] for name, rounds in costs.items()},
        "gateway_cpu_s_per_1000_tokens": per,
        "cost_by_pair": ratios,
        "cost_mean": cost,
        "cost_standard_error": spread,
        "cost_median": median(ratios),
        "exports": collector.exports,
        "export_bytes": collector.received_bytes,
    }
    problems = []
    if cost > COST_MAX:
        problems.append(
            f"tracing {SAMPLE_RATIO:.0%} of the requests costs {cost:.1%} of the gateway's"
            f" processor time (± {spread:.1%}), more than {COST_MAX:.0%}"
        )
    if not collector.exports:
        problems.append("no trace has arrived, so nothing was measured")
    rows = [
        *((f"tracing {name}", _shown(values)) for name, values in per.items()),
        ("cost, mean of the pairs", f"{cost:+.2%} ± {spread:.2%}"),
        ("cost, median of the pairs", f"{median(ratios):+.2%}"),
        ("traces", f"{collector.exports} exports, {collector.received_bytes:,} bytes"),
    ]
    return TrialVerdict(figures, rows, problems)


def _shown(values: Sequence[float]) -> str:
    return (
        f"{1e3 * mean(values):.2f} ms of the gateway for 1,000 tokens"
        f" ({1e3 * min(values):.2f} to {1e3 * max(values):.2f})"
    )


def _cluster(deployment: Deployment, gateway: Mapping[str, Any]) -> Tideserve:
    # The two share the processors: more threads would spend their time waiting for each other.
    options = dict(deployment.options) | {"gateway": dict(gateway), "threads": 1}
    return Tideserve("tideserve", (), replace(deployment, workers=1, options=options))


def _pair(systems: Mapping[str, Tideserve], count: int, seed: int) -> dict[str, GatewayCost]:
    """Give each its half of `count` requests. Raises SystemUnavailable if any fails."""
    names = sorted(systems, reverse=bool(seed % 2))
    job = Job(
        urls=tuple(systems[name].urls[0] for name in names),
        model=systems[OFF].model,
        requests=fixed(count, PROMPT_TOKENS, OUTPUT_TOKENS, seed).requests,
        timeout_s=ROUND_TIMEOUT_S,
        concurrency=CONCURRENCY,
    )
    before = {name: systems[name].gateway_cost() for name in names}
    run_answered(job)
    after = {name: systems[name].gateway_cost() for name in names}
    return {name: after[name].since(before[name]) for name in names}


TRIAL = Trial(
    name="tracing",
    summary="processor time of the gateway with 1 % of the requests traced",
    memory="128MiB",
    run=run,
)
