"""`overhead`: times from the workers' event logs, matched with the client's."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_log import EngineTimes, Iteration, read_engine_logs
from benchmarks.scenarios.overhead import overhead
from services.common.event_log import EventLog
from services.core.changeover.state import Changeover, MemberConfig
from services.core.planner.config import IterationConfig
from services.core.planner.events import IterationFinished, Planned, RequestArrived
from services.core.request import Limits, Request, Sampling
from tideserve.cli.errors import SystemUnavailable
from tideserve.load.record import RequestOutcome, Round, SentRequest


def log_of_one_request(folder: Path, arrived_s: float, iteration_s: float) -> None:
    """The log of a worker that ran one request of three tokens."""
    config = IterationConfig(
        block_size=16, num_blocks=8, max_batch_tokens=64, max_running=8, max_waiting=8
    )
    made_with = MemberConfig("w0", 2, tied_embeddings=False, planner=config)
    state = Changeover.of(made_with)
    log = EventLog(folder, "worker-0", made_with)

    def tell(event: Any) -> None:
        commands = state.handle(event)
        log.append("event", [event])
        log.append("command", commands)

    request = Request("cmpl-1", (1, 2, 3), Sampling(), Limits(3), arrived_s)
    tell(RequestArrived(arrived_s, request))
    now_s = arrived_s
    for _ in range(3):
        log.append("batch", [Planned(0.0, state.plan(0.0))])
        now_s += iteration_s
        tell(IterationFinished(now_s, {"cmpl-1": 7}))
    log.append("batch", [Planned(0.0, state.plan(0.0))])
    log.close()


def test_times_are_read_from_the_log(tmp_path: Path) -> None:
    log_of_one_request(tmp_path, arrived_s=100.0, iteration_s=0.5)
    times = read_engine_logs(tmp_path)
    assert times.arrived_s == {"cmpl-1": 100.0}
    assert times.first_token_s == {"cmpl-1": 100.5}
    assert [iteration.end_s for iteration in times.iterations] == [100.5, 101.0, 101.5]
    assert [iteration.duration_s for iteration in times.iterations] == pytest.approx([0.5] * 3)
    share = times.planning_share(100.0, 102.0)
    assert share is not None and 0 < share < 0.1
    assert times.planning_share(0.0, 1.0) is None


def test_a_missing_log_is_a_short_error(tmp_path: Path) -> None:
    with pytest.raises(SystemUnavailable, match="wrote no event log"):
        read_engine_logs(tmp_path)


def test_overhead_is_the_time_to_the_engine_and_back() -> None:
    times = EngineTimes(
        arrived_s={"a": 10.01},
        first_token_s={"a": 10.11},
        iterations=[Iteration(10.11, 0.1, 0.001)],
    )
    known = SentRequest(
        10.0, 10.0, 10.2, RequestOutcome.COMPLETED, 4, 2, (10.13, 10.2), request_id="a"
    )
    unknown = SentRequest(
        10.0, 10.0, 10.2, RequestOutcome.COMPLETED, 4, 2, (10.13,), request_id="b"
    )
    result = overhead(times, [Round((known, unknown))], [])
    assert result["requests_matched"] == 1
    assert result["to_engine_s"]["p50"] == pytest.approx(0.01)
    assert result["from_engine_s"]["p50"] == pytest.approx(0.02)
    assert result["added_to_ttft_s"]["p99"] == pytest.approx(0.03)
    assert result["planning_share_alone"] == pytest.approx(0.01)
    assert result["planning_share_together"] is None
