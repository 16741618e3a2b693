"""What the trial of the doors makes of its rounds."""

import orjson
import pytest

from benchmarks.scenarios.doors import GRPC, HTTP, LONG, SHORT, DoorCost, Prices, judge, prices


def cost(request_s: float, token_s: float, length: int, count: int = 10) -> DoorCost:
    """The cost of so many requests of that length, at these prices."""
    return DoorCost(count * (request_s + length * token_s), count, count * length, 0.05)


def test_two_lengths_tell_a_request_from_its_tokens() -> None:
    found = prices(cost(3e-3, 2e-4, SHORT, 400), cost(3e-3, 2e-4, LONG, 100))
    assert (found.request_s, found.token_s) == pytest.approx((3e-3, 2e-4))


def test_doors_are_compared_pair_by_pair() -> None:
    def over(pairs: list[Prices]) -> dict[int, list[DoorCost]]:
        return {n: [cost(one.request_s, one.token_s, n) for one in pairs] for n in (SHORT, LONG)}

    http = [Prices(1e-3, 1e-4), Prices(2e-3, 2e-4), Prices(4e-3, 4e-4)]
    grpc = [Prices(2e-3, 1e-4), Prices(4e-3, 1e-4), Prices(4e-3, 4e-3)]
    verdict = judge({HTTP: over(http), GRPC: over(grpc)}, 0.01)
    assert verdict.figures["grpc_over_http"] == pytest.approx({"request": 2.0, "token": 1.0})
    assert verdict.figures[HTTP]["cpu_s_per_token"] == pytest.approx([1e-4, 2e-4, 4e-4])
    assert verdict.figures[GRPC]["cpu_s_per_1000_tokens_by_length"][str(SHORT)] == pytest.approx(
        1.1
    )
    assert verdict.figures["idle_share_of_a_processor"] == 0.01
    assert "2.00 ms of the gateway for a request and 200 µs" in dict(verdict.rows)[HTTP]
    assert verdict.problems == []
    assert orjson.loads(orjson.dumps(verdict.figures)) == verdict.figures
