"""Requests whose KV was shipped: the gateway starts them at the target without an ask."""

import pytest

from services.gateway.serving.retry import FRUITLESS_MAX
from tests.support.gateway import TEXT, Case
from tideserve.worker.v1 import worker_pb2

pytestmark = pytest.mark.gateway(workers=2, max_model_len=4096)


@pytest.fixture(autouse=True)
def moving(case: Case) -> None:
    """Both workers send each request to the other after three tokens."""
    source, target = case.cluster.workers
    for worker, other in ((source, target), (target, source)):
        worker.fails_after, worker.failure = 3, worker_pb2.FINISH_REASON_RETURNED
        worker.go_to = other


async def test_a_request_follows_its_kv(case: Case) -> None:
    answer = await case.complete(max_tokens=12)
    assert answer.json()["choices"][0]["text"] == TEXT[:12]
    scheduler = case.cluster.scheduler
    assert len(scheduler.asks) == 1
    starts = [start for worker in case.cluster.workers for start in worker.starts]
    assert sorted(len(start.output_ids) for start in starts) == [0, 3, 6, 9]
    assert all(start.resumable for start in starts)
    first = scheduler.asks[0].request_id
    assert [placed.request_id for placed in scheduler.placed] == [first] * 3
    groups = [placed.group_id for placed in scheduler.placed]
    assert groups[0] == groups[2] != groups[1]
    metrics = (await case.http.get("/metrics")).text
    assert "tideserve_gateway_moved_streams_total 3.0" in metrics
    assert "tideserve_gateway_resumed_streams_total 0.0" in metrics


async def test_a_prefill_worker_learns_where_to_hand_a_request_over(case: Case) -> None:
    """Only the assigned start names a target worker; the next worker decodes."""
    source, target = case.cluster.workers
    case.cluster.scheduler.workers = (source,)
    source.fails_after, target.fails_after = 1, None
    source.hand_to = source.go_to = target
    answer = await case.complete(max_tokens=12)
    assert answer.json()["choices"][0]["text"] == TEXT[:12]
    assert len(case.cluster.scheduler.asks) == 1
    (first,), (second,) = source.starts, target.starts
    assert first.hand_to == target.place and first.resumable
    assert not second.HasField("hand_to") and len(second.output_ids) == 1


@pytest.mark.parametrize(
    "reason", [worker_pb2.FINISH_REASON_STALE_EPOCH, worker_pb2.FINISH_REASON_OVERLOADED]
)
async def test_a_refusal_of_the_target_causes_an_ask(
    case: Case, reason: "worker_pb2.FinishReason.ValueType"
) -> None:
    source, target = case.cluster.workers
    for worker in (source, target):
        worker.fails_after = None
    case.cluster.scheduler.workers = (source,)  # asks are assigned to the first worker
    source.fails_after, target.fails_after, target.failure = 3, 0, reason

    async def generate(start: worker_pb2.Start, *others: object) -> None:
        if start.output_ids:
            source.fails_after = None
        await original(start, *others)

    original = source._generate
    source._generate = generate  # type: ignore[method-assign,assignment]
    answer = await case.complete(max_tokens=12)
    assert answer.json()["choices"][0]["text"] == TEXT[:12]
    again = case.cluster.scheduler.asks[1]
    assert len(case.cluster.scheduler.asks) == 2 and again.resumed
    assert (again.refused_group_id, again.returned) == (f"group-{target.worker_id}", False)


async def test_a_request_that_moves_endlessly_ends(case: Case) -> None:
    for worker in case.cluster.workers:
        worker.fails_after = 0
    source = case.cluster.workers[0]

    async def generate(start: worker_pb2.Start, *others: object) -> None:
        source.fails_after = 0 if start.output_ids else 3
        await original(start, *others)

    original = source._generate
    source._generate = generate  # type: ignore[method-assign,assignment]
    case.cluster.scheduler.workers = (source,)
    answer = await case.complete(max_tokens=12)
    assert answer.status_code == 503
    starts = sum(len(worker.starts) for worker in case.cluster.workers)
    assert starts == FRUITLESS_MAX + 1
