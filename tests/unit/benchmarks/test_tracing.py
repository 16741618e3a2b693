"""What the tracing trial makes of its rounds."""

from concurrent.futures import Future

import pytest

from benchmarks.scenarios.tracing import COST_MAX, OFF, ON, Collector, judge
from benchmarks.systems.gateway_cost import GatewayCost
from services.common.span_export import OtlpSink
from services.common.tracing import Span, Tracer
from tideserve.cli.local_cluster import free_port


def costs(off: list[float], on: list[float]) -> dict[str, list[GatewayCost]]:
    return {
        OFF: [GatewayCost(one, 1000) for one in off],
        ON: [GatewayCost(one, 2000) for one in on],
    }


def told() -> Collector:
    collector = Collector()
    collector._export(b"1234", Future())
    return collector


def test_the_cost_is_the_mean_of_the_pairs_by_the_token() -> None:
    verdict = judge(costs([1.0, 2.0], [2.0, 4.12]), told())
    assert verdict.figures["cost_by_pair"] == pytest.approx([0.0, 0.03])
    assert verdict.figures["cost_mean"] == pytest.approx(0.015)
    assert verdict.figures["cost_standard_error"] == pytest.approx(0.015)
    assert verdict.problems == []


def test_too_dear_is_a_problem_and_so_is_no_trace_at_all() -> None:
    dear = 2 * (1 + 2 * COST_MAX)
    (problem,) = judge(costs([1.0, 1.0], [dear, dear]), told()).problems
    assert "costs 4.0% of the gateway's processor time" in problem
    (problem,) = judge(costs([1.0, 1.0], [2.0, 2.0]), Collector()).problems
    assert problem == "no trace has arrived, so nothing was measured"


def test_the_collector_takes_what_the_exporter_sends() -> None:
    collector, port = Collector(), free_port()
    with collector.serving(port):
        sink = OtlpSink(f"http://127.0.0.1:{port}", "gateway", "i")
        sink.export(Tracer(1.0, sink).begin(), Span("chat m", 0.0, 1.0))
        sink.close()
    assert collector.exports == 1 and collector.received_bytes > 50
