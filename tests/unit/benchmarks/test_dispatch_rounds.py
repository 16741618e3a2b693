"""Rounds of the same arrivals on a gateway and on plain servers."""

import pytest

from benchmarks.dispatch_rounds import SATURATING, UTILISATION, DispatchRounds
from tideserve.load.record import RequestOutcome, SentRequest
from tideserve.load.traces import AZURE_CODE, load_trace
from tideserve.load.workload import LengthScale, Workload

ROUNDS = DispatchRounds("gateway", "plain", {"lengths": LengthScale(0.1)}, {"lengths": 1.0})
FIRST_TOKEN_S = {"gateway": 2.0, "plain": 1.0}


class Sent:
    """Completes each load at once; a saturating load takes 10 s."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, Workload, int | None]] = []

    def send(self, name: str, load: Workload, concurrency: int | None) -> list[SentRequest]:
        self.loads.append((name, load, concurrency))
        return [
            SentRequest(
                *(0.0, 0.0, 10.0, RequestOutcome.COMPLETED, len(request.prompt_ids)),
                token_times_s=(FIRST_TOKEN_S[name], 10.0),
            )
            for request in load.requests
        ]


def test_both_systems_get_the_same_arrivals_at_a_share_of_the_saturated_rate() -> None:
    sent = Sent()
    recorded = load_trace(AZURE_CODE).slice(250.0, 25.0)
    record = ROUNDS.measure(sent.send, recorded, 2, 0, lambda line: None)
    saturating, rounds = sent.loads[:2], sent.loads[2:]
    assert {(name, concurrency) for name, _, concurrency in saturating} == {
        ("gateway", SATURATING),
        ("plain", SATURATING),
    }
    requests = len(saturating[0][1].requests)
    assert record.rates_per_s == {"lengths": pytest.approx(UTILISATION * requests / 10.0)}
    assert [name for name, _, _ in rounds] == ["gateway", "plain", "plain", "gateway"]
    assert rounds[0][1] == rounds[1][1] and rounds[2][1] == rounds[3][1]
    assert rounds[0][1] != rounds[2][1]
    figures, rows, problems = ROUNDS.judge(record)
    assert figures["lengths"]["p99_ratio"] == 2.0
    assert [name for name, _ in rows] == ["lengths"]
    assert problems == ["lengths: P99 TTFT is 2.00 x that of round-robin"]
