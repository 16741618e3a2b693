"""Random gRPC messages, valid and invalid: each is answered, and nothing leaks."""

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.common.etcd import Store
from services.core.quota.limits import QuotaLimits
from services.gateway import app as gateway_app
from services.gateway.keys.quotas import Quotas
from services.worker.start_frame import to_request
from tests.support.bad_inputs import CONTEXT, VOCABULARY
from tests.support.exposition import Samples, samples, value
from tests.support.gateway import Case, gateway_case
from tests.support.grpc_fuzz import GrpcFuzz
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key

AT_ONCE = 24
LIMITS = QuotaLimits(10**9, 10**12, 10**6)
LEFT_OVER = ("requests_inflight", "requests_admitting", "requests_running", "body_bytes")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Quotas]:
    """The `Quotas` objects that gateways create."""
    quotas: list[Quotas] = []

    def noted(*arguments: Any, **named: Any) -> Quotas:
        quotas.append(Quotas(*arguments, **named))
        return quotas[-1]

    monkeypatch.setattr(gateway_app, "Quotas", noted)
    return quotas


@pytest.fixture
def key(tmp_path: Path) -> str:
    return add_key(tmp_path / "keys", "alice", False, None, LIMITS)


@pytest.fixture
async def case(store: Store, tmp_path: Path, made: list[Quotas], key: str) -> AsyncIterator[Case]:
    settings: dict[str, Any] = {"api_keys_file": tmp_path / "keys", "admin_key": "a" * 32}
    async with gateway_case(
        store, tmp_path / "model", max_model_len=CONTEXT, sent_key=key, **settings
    ) as case:
        worker = case.cluster.workers[0]
        worker.step_s, worker.tokens_per_event = 0.0, 4
        yield case


async def fuzzed(case: Case, quotas: Quotas, key: str, seeds: range) -> Counter[str]:
    """Send the messages of these seeds, and check for leaks."""
    worker = case.cluster.workers[0]
    async with grpc.aio.insecure_channel(case.target) as channel:
        fuzz = GrpcFuzz(channel, key, "m", AT_ONCE)
        await fuzz.run(seeds)
    assert not fuzz.failures, "\n".join(fuzz.failures)
    await eventually(lambda: not worker.active)

    async def metrics() -> Samples:
        headers = {"authorization": "Bearer " + "a" * 32}
        return samples((await case.admin.get("/metrics", headers=headers)).text)

    async def nothing_left() -> bool:
        scraped = await metrics()
        return not any(value(scraped, f"tideserve_gateway_{name}") for name in LEFT_OVER)

    await eventually(nothing_left)
    statuses = {dict(labels).get("status") for _, labels in await metrics()}
    assert "200" in statuses and "500" not in statuses
    use = quotas.state.use("alice", LIMITS, quotas._now_s())
    assert use.running == 0
    # Workers accept every request that the gateway accepts.
    for start in worker.starts:
        to_request(start, VOCABULARY, CONTEXT, now_s=0.0)
    assert (await case.grpc.complete("hi", model="m", max_tokens=3)).usage.completion_tokens == 3
    assert (await case.complete(max_tokens=3)).status_code == 200
    return fuzz.codes


async def test_three_hundred_random_messages(case: Case, made: list[Quotas], key: str) -> None:
    codes = await fuzzed(case, made[0], key, range(300))
    # Both kinds must be frequent, or the test would prove little.
    assert codes["OK"] > 100 and codes["INVALID_ARGUMENT"] > 50 and codes["cut"] > 5, codes


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_ten_thousand_random_messages(case: Case, made: list[Quotas], key: str) -> None:
    codes = await fuzzed(case, made[0], key, range(1000, 11_000))
    assert codes["OK"] > 3000 and codes["INVALID_ARGUMENT"] > 2000 and codes["cut"] > 150, codes
