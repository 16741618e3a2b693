"""Random requests, valid and invalid: no crash, hang or leak, and valid ones are served."""

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.etcd import Store
from services.worker.start_frame import to_request
from tests.support.bad_inputs import CONTEXT, VOCABULARY
from tests.support.exposition import samples, value
from tests.support.gateway import Case, gateway_case
from tests.support.http_fuzz import HttpFuzz
from tests.support.waiting import eventually

AT_ONCE = 24
LEFT_OVER = ("requests_inflight", "requests_admitting", "requests_running", "body_bytes")


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    async with gateway_case(store, tmp_path / "model", max_model_len=CONTEXT) as case:
        worker = case.cluster.workers[0]
        worker.step_s, worker.tokens_per_event = 0.0, 4
        yield case


async def fuzzed(case: Case, seeds: range) -> Counter[int | str]:
    """Send the requests of these seeds, and check for leaks."""
    fuzz = HttpFuzz(case.http, "m", AT_ONCE)
    worker = case.cluster.workers[0]
    await fuzz.run(seeds)
    await eventually(lambda: not worker.active)

    async def nothing_left() -> bool:
        metrics = samples((await case.http.get("/metrics")).text)
        return not any(value(metrics, f"tideserve_gateway_{name}") for name in LEFT_OVER)

    await eventually(nothing_left)
    # Workers accept every request that the gateway accepts.
    for start in worker.starts:
        to_request(start, VOCABULARY, CONTEXT, now_s=0.0)
    for good in (case.chat, case.complete):
        assert (await good(max_tokens=3)).status_code == 200
    return fuzz.statuses


async def test_a_thousand_random_requests(case: Case) -> None:
    statuses = await fuzzed(case, range(1000))
    # Both kinds must be frequent, or the test would prove little.
    assert statuses[200] > 300
    assert statuses[400] > 200
    assert statuses["cut"] > 30


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_ten_thousand_random_requests(case: Case) -> None:
    statuses = await fuzzed(case, range(1000, 11_000))
    assert statuses[200] > 3000
    assert statuses[400] > 2000
