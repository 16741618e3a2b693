"""The gateway's gRPC API as clients see it, in front of fake services."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from services.common.etcd import Store
from services.gateway.grpc import call as call_module
from services.gateway.grpc import health as gateway_health
from tests.support.gateway import TEXT, Case, endless, gateway_case, text_ids
from tests.support.waiting import eventually
from tideserve import client as tide
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc
from tideserve.worker.v1 import worker_pb2

HI = "hi"
HI_TOKENS = len("user\nhi" + "\n" + "assistant\n") + 3
SERVICE = "tideserve.gateway.v1.GatewayService"


async def test_a_streamed_chat_equals_the_whole_chat(case: Case) -> None:
    whole = await case.grpc.chat(HI, model="m", max_tokens=90)
    (choice,) = whole.choices
    assert whole.id.startswith("chatcmpl-") and whole.model == "m" and whole.created > 1.7e9
    assert choice.message.role == pb.ROLE_ASSISTANT
    assert (TEXT * 3).startswith(choice.message.text.rstrip("\ufffd"))
    assert choice.finish_reason == pb.FINISH_REASON_LENGTH
    usage = pb.Usage(prompt_tokens=HI_TOKENS, completion_tokens=90, total_tokens=HI_TOKENS + 90)
    assert whole.usage == usage
    for tokens_per_event in (1, 7):
        case.cluster.workers[0].tokens_per_event = tokens_per_event
        async with case.grpc.stream_chat(HI, model="m", max_tokens=90) as stream:
            pieces = [piece async for piece in stream]
        assert (pieces[0].id, pieces[0].model) == (stream.id, "m")
        assert not any(piece.id or piece.model or piece.created for piece in pieces[1:])
        assert "".join(piece.text for piece in pieces) == choice.message.text
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        assert token_ids == list(choice.token_ids) and len(token_ids) == 90
        sent = 0
        for piece in pieces:
            assert piece.first_index == sent
            sent += len(piece.token_ids)
        assert [piece.finish_reason for piece in pieces[:-1]] == [0] * (len(pieces) - 1)
        assert not any(piece.HasField("usage") or piece.HasField("timing") for piece in pieces[:-1])
        assert (pieces[-1].finish_reason, pieces[-1].usage) == (pb.FINISH_REASON_LENGTH, usage)


async def test_completions_of_text_ids_and_several_prompts(case: Case) -> None:
    prompts: list[Any] = ["hi", ["hi"], text_ids("hi"), [text_ids("hi")]]
    for prompt in prompts:
        answer = await case.grpc.complete(prompt, model="m", max_tokens=8)
        assert [choice.text for choice in answer.choices] == [TEXT[:8]]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 8)
        assert list(case.cluster.workers[0].starts[-1].prompt_ids) == text_ids("hi")
    several = await case.grpc.complete(["a", "bc"], model="m", max_tokens=8)
    assert [(c.index, c.text) for c in several.choices] == [(0, TEXT[:8]), (1, TEXT[:8])]
    async with case.grpc.stream_complete(["a", "bc"], model="m", max_tokens=8) as stream:
        pieces = [piece async for piece in stream]
    for index in (0, 1):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == TEXT[:8]
        assert mine[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert [piece.HasField("usage") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].usage == several.usage


async def test_stop_matches_are_reported(case: Case) -> None:
    answer = await case.grpc.chat(HI, model="m", stop=" comes")
    assert answer.choices[0].message.text == "The tide"
    assert answer.choices[0].stop_reason == pb.StopReason(text=" comes")
    stop_id = text_ids("!")[0]
    worker = case.cluster.workers[0]
    worker.script = lambda _: [*text_ids("end"), stop_id]
    answer = await case.grpc.chat(HI, model="m", stop_token_ids=[stop_id])
    assert answer.choices[0].message.text == "end"
    assert answer.choices[0].stop_reason == pb.StopReason(token_id=stop_id)
    worker.script = endless
    async with case.grpc.stream_chat(HI, model="m", stop=" comes") as stream:
        pieces = [piece async for piece in stream]
    assert pieces[-1].stop_reason == pb.StopReason(text=" comes")


async def test_timing_is_that_of_the_worker(case: Case) -> None:
    times = worker_pb2.RequestTimes(wait_s=0.5, prefill_s=0.25, decode_s=2.0)
    case.cluster.workers[0].times = times
    answer = await case.grpc.complete("hi", model="m", max_tokens=4)
    assert answer.timing.queue_s >= 0.5
    assert (answer.timing.prefill_s, answer.timing.decode_s) == (0.25, 2.0)
    async with case.grpc.stream_complete("hi", model="m", max_tokens=4) as stream:
        pieces = [piece async for piece in stream]
    assert pieces[-1].timing.decode_s == 2.0


async def test_models(case: Case) -> None:
    (model,) = await case.grpc.models()
    assert (model.id, model.root, model.owned_by, model.max_model_len) == (
        "m",
        "m",
        "tideserve",
        256,
    )


async def test_cancelling_a_stream_aborts_it_at_the_worker(case: Case) -> None:
    worker = case.paused(3)
    async with case.grpc.stream_chat(HI, model="m") as stream:
        await anext(stream)
    await eventually(lambda: worker.aborted == [worker.starts[-1].request_id])
    assert not worker.active


async def test_a_deadline_ends_the_wait_in_the_queue(case: Case) -> None:
    case.cluster.scheduler.holding = True
    with pytest.raises(tide.DeadlineExceeded):
        await case.grpc.chat(HI, model="m", timeout_s=3.0)
    await eventually(lambda: case.cluster.scheduler.withdrawn)


async def test_unavailable_calls_are_retried_by_grpc(case: Case) -> None:
    scheduler = case.cluster.scheduler
    case.refuse(message="full", retry_after_s=0.01)
    with pytest.raises(tide.Unavailable) as caught:
        await case.grpc.chat(HI, model="m", request_id="mine")
    assert len(scheduler.asks) == 4, "three times more"
    assert caught.value.reason == "QUEUE_FULL"
    assert 0.01 <= (caught.value.retry_after_s or 0) <= 0.03
    assert caught.value.request_id == "mine"


async def test_a_failed_stream_reports_its_progress(case: Case) -> None:
    worker = case.paused(5)
    async with case.grpc.stream_chat(HI, model="m") as stream:
        got = await anext(stream)
        count = len(got.token_ids)
        while count < 5:
            count += len((await anext(stream)).token_ids)
        worker.die()
        with pytest.raises(tide.StreamLost) as caught:
            await anext(stream)
    assert (caught.value.next_index, caught.value.metadata["cause"]) == (5, "WORKER_LOST")
    assert len(worker.starts) == 4, "it went on three times, and got no further"


async def test_calls_are_logged_like_requests(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "services.gateway.records.request_log")
    await case.grpc.chat(HI, model="m", max_tokens=4, request_id="mine")
    with pytest.raises(tide.InvalidRequest):
        await case.grpc.chat(HI, model="m", temperature=7.0)
    await eventually(lambda: len(caplog.records) == 2)
    good, bad = (record.__dict__["fields"] for record in caplog.records)
    assert good["endpoint"] == f"/{SERVICE}/Chat"
    assert (good["status"], good["grpc_code"], good["output_tokens"]) == (200, "OK", 4)
    assert (bad["status"], bad["grpc_code"]) == (400, "INVALID_ARGUMENT")
    metrics = (await case.http.get("/metrics")).text
    assert (
        f'tideserve_gateway_requests_total{{endpoint="/{SERVICE}/Chat",status="200"}} 1.0'
        in metrics
    )
    assert (
        f'tideserve_gateway_requests_total{{endpoint="/{SERVICE}/Chat",status="400"}} 1.0'
        in metrics
    )


async def raw(case: Case, method: str, data: bytes, **options: Any) -> bytes:
    """Call a method with raw bytes."""
    async with grpc.aio.insecure_channel(case.target) as channel:
        return bytes(await channel.unary_unary(method)(data, timeout=20, **options))


async def test_malformed_messages(case: Case) -> None:
    cases = [
        (f"/{SERVICE}/Chat", b"\xff\xff", "INVALID_ARGUMENT", "UNDECODABLE"),
        (f"/{SERVICE}/Chat", b"", "INVALID_ARGUMENT", "INVALID_REQUEST"),
        (f"/{SERVICE}/Nothing", b"", "UNIMPLEMENTED", "NOT_FOUND"),
        ("/other.Service/Nothing", b"", "UNIMPLEMENTED", "NOT_FOUND"),
        (f"/{SERVICE}/Chat", b"x" * (4 * 2**20 + 1), "RESOURCE_EXHAUSTED", ""),
    ]
    for method, data, code, reason in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(case, method, data)
        assert caught.value.code().name == code, method
        status = rpc_status.from_call(caught.value)
        info = error_details_pb2.ErrorInfo()
        if status is not None:
            assert status.details[0].Unpack(info)
        assert info.reason == reason


def odd(request: Any) -> bytes:
    """The encoded request with an unknown field."""
    return bytes(request.SerializeToString()) + b"\xf8\x06\x01"


def unknown_requests() -> dict[str, Any]:
    """The metrics of calls by method."""
    chat = pb.ChatRequest(model="m", messages=[pb.Message(role=pb.ROLE_USER, text="hi")])
    completion = pb.CompleteRequest(model="m", prompts=[pb.Prompt(text="hi")])
    chat.sampling.max_tokens = completion.sampling.max_tokens = 1
    return {
        "Chat": chat,
        "Complete": completion,
        "StreamChat": pb.StreamChatRequest(chat=chat),
        "StreamComplete": pb.StreamCompleteRequest(completion=completion),
        "Tokenize": pb.TokenizeRequest(model="m", text="hi"),
        "Detokenize": pb.DetokenizeRequest(model="m", token_ids=[5]),
    }


async def test_tokenizing_an_empty_text(case: Case) -> None:
    empty = pb.TokenizeRequest(model="m", text="").SerializeToString()
    answer = await raw(case, f"/{SERVICE}/Tokenize", empty)
    assert list(pb.TokenizeResponse.FromString(answer).token_ids) == []
    none = pb.DetokenizeRequest(model="m").SerializeToString()
    answer = await raw(case, f"/{SERVICE}/Detokenize", none)
    assert pb.DetokenizeResponse.FromString(answer).text == ""


async def test_unknown_fields_are_listed(case: Case) -> None:
    async with grpc.aio.insecure_channel(case.target) as channel:
        for method, request in unknown_requests().items():
            call = channel.unary_stream(f"/{SERVICE}/{method}")(odd(request), timeout=20)
            assert await call.read() is not grpc.aio.EOF, method
            metadata = dict(await call.initial_metadata())
            warning = '299 tideserve "ignored unknown fields: field-111"'
            assert metadata["warning"] == warning, method


@pytest.mark.gateway(unknown_fields="refuse")
async def test_unknown_fields_can_be_refused(case: Case) -> None:
    for method, request in unknown_requests().items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(case, f"/{SERVICE}/{method}", odd(request))
        assert tide.errors.error_of(caught.value).reason == "UNKNOWN_PARAMETER", method
        await raw(case, f"/{SERVICE}/{method}", request.SerializeToString())


async def test_unset_oneofs_and_unknown_enums_are_refused(case: Case) -> None:
    message = pb.Message(role=pb.ROLE_USER, text="hi")
    cases: list[tuple[Any, str]] = [
        (pb.ChatRequest(messages=[pb.Message(text="hi")]), "messages.0.role"),
        (pb.ChatRequest(messages=[pb.Message(role=77, text="hi")]), "messages.0.role"),  # type: ignore[arg-type]
        (pb.ChatRequest(messages=[pb.Message(role=pb.ROLE_USER)]), "messages"),
        (
            pb.ChatRequest(
                messages=[
                    pb.Message(role=pb.ROLE_USER, parts=pb.ContentParts(parts=[pb.ContentPart()]))
                ]
            ),
            "messages.0.content",
        ),
        (pb.ChatRequest(messages=[message], structure=pb.Structure()), "structure"),
        (pb.ChatRequest(messages=[message], tool_choice=pb.ToolChoice()), "tool_choice"),
        (
            pb.ChatRequest(messages=[message], tool_choice=pb.ToolChoice(mode=9)),  # type: ignore[arg-type]
            "tool_choice",
        ),
        (pb.CompleteRequest(prompts=[pb.Prompt()]), "prompts"),
        (pb.CompleteRequest(), "prompts"),
        (pb.ChatRequest(), "messages"),
    ]
    for request, field in cases:
        request.model = "m"
        method = "Chat" if isinstance(request, pb.ChatRequest) else "Complete"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(case, f"/{SERVICE}/{method}", request.SerializeToString())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(caught.value)
        assert status is not None
        bad = error_details_pb2.BadRequest()
        assert any(detail.Unpack(bad) for detail in status.details), request
        assert bad.field_violations[0].field == field


async def health(target: str, name: str) -> str:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def test_health_and_reflection(case: Case) -> None:
    assert await health(case.target, "") == "SERVING"
    assert await health(case.target, SERVICE) == "SERVING"
    async with grpc.aio.insecure_channel(case.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = [response async for response in stub.ServerReflectionInfo(iter([asked]))]
    listed = {service.name for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= listed


async def test_incomplete_health_checks_time_out(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: dict[str, grpc.aio.AioRpcError] = {}
    async with grpc.aio.insecure_channel(case.target) as channel:
        for method in ("Check", "List", "Watch"):
            path = f"/grpc.health.v1.Health/{method}"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(path)(b"\xff\xff", timeout=20)
            errors[f"{method} garbage"] = caught.value
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.stream_unary(path)(iter(()), timeout=20)
            errors[f"{method} nothing"] = caught.value
        with monkeypatch.context() as patch, pytest.raises(grpc.aio.AioRpcError) as caught:
            patch.setattr(gateway_health, "MESSAGE_TIMEOUT_S", 0.05)
            await channel.stream_unary("/grpc.health.v1.Health/Check")(timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health(case.target, "x")
    assert {error.code() for error in errors.values()} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert "Traceback" not in str(errors) and "DecodeError" not in str(errors)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no message arrived" in str(caught.value.details())
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    # A watch cancelled by its client is not a failed stream.
    async with grpc.aio.insecure_channel(case.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        watch.cancel()
    assert (await case.grpc.complete("hi", model="m", max_tokens=1)).usage.completion_tokens == 1
    assert 'stream_errors_total{code="client_gone"}' not in (await case.http.get("/metrics")).text


@pytest.mark.gateway(drain_delay_s=0.5)
async def test_a_draining_gateway_finishes_streams_and_reports_it(case: Case) -> None:
    worker = case.paused(3)
    async with case.grpc.stream_chat(HI, model="m", max_tokens=6) as stream:
        texts = [(await anext(stream)).text]
        async with grpc.aio.insecure_channel(case.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20)
            statuses = [(await watch.read()).status]
            case.stop.set()
            statuses.append((await watch.read()).status)
        assert statuses == [1, 2], "SERVING, then NOT_SERVING"
        worker.go.set()
        texts += [piece.text async for piece in stream]
    assert "".join(texts) == TEXT[:6]


@pytest.mark.gateway(drain_timeout_s=0.2)
async def test_calls_running_after_the_drain_are_notified(case: Case) -> None:
    case.cluster.workers[0].pause_at = 3
    async with case.grpc.stream_chat(HI, model="m", max_tokens=6) as stream:
        await anext(stream)
        case.stop.set()
        with pytest.raises(tide.StreamLost) as caught:
            async for _ in stream:
                pass
    assert caught.value.metadata["cause"] == "SHUTTING_DOWN"


@pytest.mark.gateway(api_key="k" * 24)
async def test_a_drain_does_not_wait_for_unauthenticated_callers(case: Case) -> None:
    async with grpc.aio.insecure_channel(case.target) as channel:
        silent = channel.stream_unary(f"/{SERVICE}/Chat")(timeout=20)
        assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.gateway(client_stall_s=0.4, max_model_len=200_000)
async def test_slow_readers_are_disconnected(case: Case) -> None:
    worker = case.cluster.workers[0]
    worker.script, worker.step_s = (lambda _: text_ids(TEXT) * 2000), 0.0
    worker.tokens_per_event = 500

    async def counted(line: str) -> bool:
        return line in (await case.http.get("/metrics")).text

    # The library reads ahead, but not beyond this.
    options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(case.target, options=options) as channel:
        stub: gateway_pb2_grpc.GatewayServiceAsyncStub = gateway_pb2_grpc.GatewayServiceStub(
            channel
        )
        request = pb.CompleteRequest(
            model="m",
            prompts=[pb.Prompt(text="hi")],
            sampling=pb.Sampling(max_tokens=100_000),
        )
        stream = stub.StreamComplete(pb.StreamCompleteRequest(completion=request))
        await stream.read()
        # The client stops reading.
        await eventually(
            lambda: counted('tideserve_gateway_stream_errors_total{code="client_gone"} 1.0')
        )
        assert await counted("tideserve_gateway_requests_inflight 0.0")
        method = f"/{SERVICE}/StreamComplete"
        assert await counted(
            f'tideserve_gateway_requests_total{{endpoint="{method}",status="499"}} 1.0'
        )
        assert (await case.complete(max_tokens=3)).status_code == 200
        answer = await case.grpc.complete("hi", model="m", max_tokens=3)
        assert answer.usage.completion_tokens == 3
        # The client later learns that it was disconnected.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_calls_without_a_message_do_not_block_others(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_module, "MESSAGE_TIMEOUT_S", 2.0)
    async with (
        gateway_case(store, tmp_path / "model", inflight_max=2) as case,
        grpc.aio.insecure_channel(case.target) as channel,
    ):
        kinds = [f"/{SERVICE}/{name}" for name in ("Chat", "StreamChat", "Detokenize", "Cancel")]
        silent = [channel.stream_stream(path)(timeout=20) for path in kinds * 4]
        answer = await case.grpc.complete("hi", model="m", max_tokens=3)
        assert answer.usage.completion_tokens == 3
        assert (await case.complete(max_tokens=3)).status_code == 200
        for call in silent:
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "no message arrived" in await call.details()
