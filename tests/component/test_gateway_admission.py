"""Refusals for lateness in every API, estimated asks, and reports of outcomes."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.common.etcd import Store
from services.core.quota.limits import QuotaLimits
from services.gateway.cluster import admission_client
from tests.support.exposition import samples, value
from tests.support.gateway import TEXT, Case, gateway_case
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key
from tideserve.common.v1 import service_pb2
from tideserve.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from tideserve.kserve.v2 import inference_pb2, inference_pb2_grpc
from tideserve.scheduler.v1 import scheduler_pb2
from tideserve.worker.v1 import worker_pb2

# Stubs have no types for asynchronous calls.
Stub = Any
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 3}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "m", "input": "hi", "max_output_tokens": 3},
}
STANDARD = service_pb2.SERVICE_CLASS_STANDARD
INTERACTIVE = service_pb2.SERVICE_CLASS_INTERACTIVE


@pytest.fixture(autouse=True)
def _patient_early_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the scheduler's answers to early asks for as long as a busy machine may take."""
    monkeypatch.setattr(admission_client, "ESTIMATED_TIMEOUT_S", 30.0)


def refuse_as_late(case: Case, retry_after_s: float, booked: bool = True) -> None:
    case.cluster.scheduler.refusal = scheduler_pb2.Refusal(
        reason=scheduler_pb2.REFUSAL_REASON_TOO_LATE,
        message="the queue is long; retry later",
        retry_after_s=retry_after_s,
        booked=booked,
    )


async def predict(case: Case, *waits: scheduler_pb2.ClassWait) -> None:
    """Send class waits as the scheduler, and wait until the gateway has received them."""
    scheduler = case.cluster.scheduler
    scheduler.class_waits[:], scheduler.wants_outcomes = waits, True

    async def received() -> bool:
        await case.complete(max_tokens=1)
        return bool(scheduler.outcomes)

    await eventually(received)
    scheduler.asks.clear()
    scheduler.outcomes.clear()


def outcomes_of(case: Case) -> list[scheduler_pb2.Outcome]:
    """The reported outcomes of the requests since `predict`."""
    scheduler = case.cluster.scheduler
    ids = {ask.request_id for ask in scheduler.asks}
    return [outcome for outcome in scheduler.outcomes if outcome.request_id in ids]


def overload_status(path: str) -> int:
    """Status of a refusal, which differs in Anthropic's API."""
    return 529 if path == "/v1/messages" else 503


def long_wait(optimistic_s: float = 8.0, **fields: Any) -> scheduler_pb2.ClassWait:
    known: dict[str, Any] = {"model": "m", "service_class": STANDARD, "limit_s": 10.0}
    return scheduler_pb2.ClassWait(optimistic_s=optimistic_s, **known | fields)


async def test_every_http_api_reports_a_late_request_with_its_booked_retry(case: Case) -> None:
    refuse_as_late(case, 7)
    for path, body in ROUTES.items():
        for more in ({}, {"stream": True}):
            answer = await case.http.post(path, json=body | more)
            # A booked time has no jitter.
            assert answer.status_code == overload_status(path), path
            assert answer.headers["retry-after"] == "7"
            error = answer.json()["error"]
            kind = "overloaded_error" if path == "/v1/messages" else "service_unavailable"
            assert error["type"] == kind
            assert error.get("code", "too_late") == "too_late"
    metrics = samples((await case.http.get("/metrics")).text)
    labels = {"model_name": "m", "reason": "too_late", "class": "standard"}
    assert value(metrics, "vllm:admission_rejections_total", **labels) == 2 * len(ROUTES)


async def test_a_retry_without_a_booking_has_jitter(case: Case) -> None:
    refuse_as_late(case, 40, booked=False)
    delays = {(await case.complete()).headers["retry-after"] for _ in range(20)}
    assert len(delays) > 1 and all(40 <= int(delay) <= 50 for delay in delays)


async def test_every_grpc_service_reports_a_late_request_with_its_booked_retry(
    case: Case,
) -> None:
    refuse_as_late(case, 7)
    prompt = gateway_pb2.Prompt(text="hi")
    request = gateway_pb2.CompleteRequest(model="m", prompts=[prompt])
    tensor = inference_pb2.ModelInferRequest.InferInputTensor(
        name="text_input",
        datatype="BYTES",
        shape=[1],
        contents=inference_pb2.InferTensorContents(bytes_contents=[b"hi"]),
    )
    inference = inference_pb2.ModelInferRequest(model_name="m", inputs=[tensor])
    async with grpc.aio.insecure_channel(
        case.target, options=[("grpc.enable_retries", 0)]
    ) as channel:
        stub: Stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        kserve: Stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        for call in (stub.Complete(request), kserve.ModelInfer(inference)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            trailer = dict(caught.value.trailing_metadata() or ())
            assert trailer["grpc-retry-pushback-ms"] == "7000"
            status = rpc_status.from_call(caught.value)
            assert status is not None
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            assert any(detail.Unpack(info) for detail in status.details)
            assert any(detail.Unpack(retry) for detail in status.details)
            assert (info.reason, retry.retry_delay.ToSeconds()) == ("TOO_LATE", 7)
        streamed = kserve.ModelStreamInfer(iter([inference]))
        responses = [response async for response in streamed]
        assert [response.error_message for response in responses] == [
            "the queue is long; retry later"
        ]


async def test_a_retry_has_the_fingerprint_of_the_first_attempt(case: Case) -> None:
    for _ in range(2):
        for path, body in ROUTES.items():
            await case.http.post(path, json=body)
        await case.grpc.complete("hi", model="m", max_tokens=3)
    await case.complete(n=2)
    asks = [ask.fingerprint for ask in case.cluster.scheduler.asks]
    first, second, choices = asks[:5], asks[5:10], asks[10:]
    assert first == second and all(asks)
    # Chat and Messages accept the same body here.
    assert len({*first, *choices}) == 6


async def test_the_expected_output_is_part_of_the_ask(case: Case) -> None:
    for text, status in (("120", 200), ("-1", 400), ("1.5", 400), ("²", 400), ("9" * 12, 400)):
        answer = await case.http.post(
            "/v1/completions",
            json=COMPLETION,
            headers=[(b"x-expected-output-tokens", text.encode())],
        )
        assert answer.status_code == status, text
    await case.complete(max_tokens=1)
    assert [ask.expected_tokens for ask in case.cluster.scheduler.asks] == [120, 0]


async def test_an_expected_long_wait_causes_an_ask_before_tokenization(
    case: Case,
) -> None:
    await predict(case, long_wait())
    scheduler = case.cluster.scheduler
    assert (await case.complete(prompt="x" * 40, max_tokens=5)).status_code == 200
    early, ask = scheduler.asks
    assert early.estimated and not ask.estimated
    assert early.request_id == ask.request_id
    assert early.fingerprint == ask.fingerprint
    # The test's tokenizer has a token per byte, which the estimate learns.
    assert 10 <= early.prompt_tokens < ask.prompt_tokens == 40
    for _ in range(100):
        await case.complete(prompt="x" * 40, max_tokens=1)
    assert scheduler.asks[-2].estimated and scheduler.asks[-2].prompt_tokens >= 35
    assert (await case.complete(prompt=[1, 2, 3], max_tokens=1)).status_code == 200
    assert scheduler.asks[-2].estimated and scheduler.asks[-2].prompt_tokens == 3


async def test_an_early_refusal_avoids_tokenization(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    await predict(case, long_wait())
    refuse_as_late(case, 7)
    case.cluster.scheduler.asks.clear()
    for path, body in ROUTES.items():
        answer = await case.http.post(path, json=body)
        assert answer.status_code == overload_status(path), path
        assert answer.headers["retry-after"] == "7"
    assert [ask.estimated for ask in case.cluster.scheduler.asks] == [True] * len(ROUTES)


@pytest.mark.parametrize(
    ("wait", "fields"),
    [
        pytest.param(long_wait(optimistic_s=5.0), {}, id="half of the limit"),
        pytest.param(long_wait(limit_s=0.0), {}, id="no limit"),
        pytest.param(long_wait(), {"slo": {"ttft_ms": 60_000}}, id="a later target"),
        pytest.param(long_wait(), {"slo_class": "interactive"}, id="another class"),
        pytest.param(long_wait(model="other"), {}, id="another model"),
    ],
)
async def test_a_request_without_expected_lateness_is_asked_once(
    case: Case, wait: scheduler_pb2.ClassWait, fields: dict[str, Any]
) -> None:
    await predict(case, wait)
    assert (await case.complete(max_tokens=1, **fields)).status_code == 200
    assert [ask.estimated for ask in case.cluster.scheduler.asks] == [False]


async def test_a_requests_target_overrides_the_limit_of_its_class(case: Case) -> None:
    await predict(case, long_wait(optimistic_s=2.0, service_class=INTERACTIVE, limit_s=0.0))
    fields: dict[str, Any] = {"slo_class": "interactive", "max_tokens": 1}
    assert (await case.complete(**fields)).status_code == 200
    assert (await case.complete(slo={"ttft_ms": 5000}, **fields)).status_code == 200
    asks = case.cluster.scheduler.asks
    # Interactive requests have a target of 500 ms by default.
    assert [ask.estimated for ask in asks] == [True, False, False]


async def test_an_unanswered_early_ask_proceeds_to_tokenization(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_client, "ESTIMATED_TIMEOUT_S", 0.5)
    await predict(case, long_wait())
    case.cluster.scheduler.deaf = True
    assert (await case.complete(max_tokens=1)).status_code == 200
    assert [ask.estimated for ask in case.cluster.scheduler.asks] == [True, False]


@pytest.mark.gateway(early_asks=False)
async def test_early_asks_can_be_disabled(case: Case) -> None:
    await predict(case, long_wait())
    assert (await case.complete(max_tokens=1)).status_code == 200
    assert [ask.estimated for ask in case.cluster.scheduler.asks] == [False]


async def test_an_estimate_above_the_context_does_not_refuse(case: Case) -> None:
    await predict(case, long_wait())
    case.cluster.scheduler.refusal = scheduler_pb2.Refusal(
        reason=scheduler_pb2.REFUSAL_REASON_TOO_LARGE, message="too large"
    )
    answer = await case.complete(prompt="x" * 40, max_tokens=1)
    assert answer.status_code == 400
    assert [ask.estimated for ask in case.cluster.scheduler.asks] == [True, False]


async def test_a_late_request_costs_no_quota(store: Store, tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    key = add_key(keys, "amy", False, None, QuotaLimits(requests_per_minute=4))
    async with gateway_case(store, tmp_path / "model", api_keys_file=keys, sent_key=key) as case:
        scheduler = case.cluster.scheduler
        scheduler.class_waits[:], scheduler.wants_outcomes = [long_wait()], True
        refuse_as_late(case, 7)

        async def early() -> bool:
            assert (await case.complete()).status_code == 503
            return scheduler.asks[-1].estimated

        await eventually(early)
        for _ in range(10):
            assert await early()
        scheduler.refusal = None
        assert (await case.complete(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("early", [True, False])
async def test_a_refusal_for_lateness_is_not_stored_for_an_idempotency_key(
    case: Case, early: bool
) -> None:
    await predict(case, *[long_wait()] * early)
    headers = {"idempotency-key": "k"}
    refuse_as_late(case, 7)
    answer = await case.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert answer.status_code == 503
    case.cluster.scheduler.refusal = None
    answer = await case.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert answer.status_code == 200 and "idempotent-replayed" not in answer.headers


async def test_first_tokens_and_ends_are_reported(case: Case) -> None:
    await predict(case)
    scheduler = case.cluster.scheduler
    assert (await case.complete(max_tokens=5)).status_code == 200
    case.answer_with("ok")
    assert (await case.complete(max_tokens=50)).status_code == 200
    assert (await case.complete(n=2, max_tokens=4)).status_code == 200
    await eventually(lambda: len(outcomes_of(case)) == 8)
    outcomes = outcomes_of(case)
    assert {outcome.request_id for outcome in outcomes} == {
        ask.request_id for ask in scheduler.asks
    }
    ends = [outcome for outcome in outcomes if outcome.output_tokens]
    assert sorted((outcome.output_tokens, outcome.cut_off) for outcome in ends) == [
        (3, False),
        (3, False),
        (3, False),
        (5, True),
    ]
    assert all(0 < outcome.ttft_s < 60 for outcome in outcomes)


async def test_the_end_of_a_request_whose_client_disconnects_is_reported(case: Case) -> None:
    await predict(case)
    for worker in case.cluster.workers:
        worker.pause_at = 2
    async with case.stream(max_tokens=50) as answer:
        text = answer.aiter_lines()
        await anext(text)
        await eventually(lambda: outcomes_of(case))
    await eventually(lambda: len(outcomes_of(case)) == 2)
    first, end = outcomes_of(case)
    assert (first.output_tokens, first.cut_off) == (0, False)
    assert end.output_tokens in (1, 2) and end.cut_off
    assert end.ttft_s == first.ttft_s


async def test_the_end_of_a_request_that_fails_is_reported_after_its_first_token(
    case: Case,
) -> None:
    await predict(case)
    for fails_after in (0, 3):
        for worker in case.cluster.workers:
            # Such failures are not retried.
            worker.fails_after, worker.failure = fails_after, worker_pb2.FINISH_REASON_INVALID
        assert (await case.complete(max_tokens=50)).status_code == 400
    await eventually(lambda: len(outcomes_of(case)) >= 2)
    outcomes = outcomes_of(case)
    assert [(outcome.output_tokens, outcome.cut_off) for outcome in outcomes] == [
        (0, False),
        (3, True),
    ]


async def test_outcomes_are_not_sent_to_a_scheduler_without_the_capability(case: Case) -> None:
    scheduler = case.cluster.scheduler
    assert (await case.complete(max_tokens=5)).status_code == 200
    (ask,) = scheduler.asks
    await predict(case)
    assert (await case.complete(max_tokens=5)).status_code == 200
    await eventually(lambda: outcomes_of(case))
    assert ask.request_id not in {outcome.request_id for outcome in scheduler.outcomes}


async def test_the_outcome_of_a_restarted_request_is_not_reported(case: Case) -> None:
    await predict(case)
    scheduler, worker = case.cluster.scheduler, case.cluster.workers[0]
    worker.return_times = 1
    returned = await case.complete(max_tokens=4)
    assert returned.json()["choices"][0]["text"] == TEXT[:4]
    await case.complete(max_tokens=2)
    last = scheduler.asks[-1].request_id
    await eventually(lambda: len(outcomes_of(case)) >= 2)
    assert [outcome.request_id for outcome in outcomes_of(case)] == [last, last]
