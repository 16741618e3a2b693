"""Every route and method, with no key, a wrong key, and a key of another model.

Methods come from service descriptors and routes from the application, so that new ones are tested,
too, or reported as missing.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from starlette.routing import Route

from services.common.etcd import Store
from services.core.quota.limits import QuotaLimits
from services.gateway import app as gateway_app
from services.gateway.http.request_middleware import OPEN_ROUTES
from tests.support.gateway import TIMEOUT_S, Case, gateway_case
from tideserve.cli.keys import add_key
from tideserve.client import AsyncClient
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.kserve.v2 import inference_pb2 as kpb

GATEWAY, KSERVE = "/tideserve.gateway.v1.GatewayService/", "/inference.GRPCInferenceService/"
HEALTH, REFLECTION = "/grpc.health.v1.Health/", f"/{reflection.SERVICE_NAME}/"
# Ends when its client disconnects.
ENDLESS = f"{HEALTH}Watch"


class Keys(NamedTuple):
    """A key for the served model, and one for another model."""

    client: str
    foreign: str


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The applications that gateways have created."""
    built: list[Any] = []
    build = gateway_app.build

    def noted(*arguments: Any, **named: Any) -> Any:
        built.append(build(*arguments, **named))
        return built[-1]

    monkeypatch.setattr(gateway_app, "build", noted)
    return built


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys.jsonl"
    client = add_key(path, "alice", False, None, QuotaLimits())
    return Keys(client, add_key(path, "carol", False, ["other"], QuotaLimits()))


@pytest.fixture
async def case(store: Store, tmp_path: Path, apps: list[Any], keys: Keys) -> AsyncIterator[Case]:
    path = tmp_path / "keys.jsonl"
    async with gateway_case(store, tmp_path / "model", api_keys_file=path) as case:
        yield case


def routes_of(app: Any) -> Iterator[Route]:
    """The routes of the innermost application, including those of its routers."""
    while not hasattr(app, "routes"):
        app = app._app
    for route in app.routes:
        if (router := getattr(route, "original_router", None)) is not None:
            yield from routes_of(router)
        else:
            assert isinstance(route, Route)
            yield route


async def test_every_route_is_refused_without_a_key_except_health(
    case: Case, apps: list[Any], keys: Keys
) -> None:
    asked = set()
    for route in routes_of(apps[0]):
        path = route.path.replace("{model_id:path}", "m").replace("{request_id:path}", "mine")
        for method in route.methods or ():
            asked.add((method, path))
            refused = await case.http.request(method, path)
            assert (refused.status_code == 401) is (path not in OPEN_ROUTES), (method, path)
    assert len(asked) >= 10 and ("POST", "/v1/completions") in asked
    near = ("/v1/%2e%2e/live", "//live", "/live/", "/LIVE", "/live;x", "/docs", "/invocations")
    for path in near:
        assert (await case.http.get(path)).status_code == 401, path
        assert (await case.http.get(path, headers=bearer(keys.client))).status_code in (200, 404)


async def methods_of(target: str, key: str) -> dict[str, Any]:
    """The descriptors of all served methods, by path."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        metadata = tuple(bearer(key).items())
        answers = stub.ServerReflectionInfo(iter([asked]), metadata=metadata, timeout=TIMEOUT_S)
        (answer,) = [response async for response in answers]
    pool = descriptor_pool.Default()
    services = [service.name for service in answer.list_services_response.service]
    return {
        f"/{service}/{method.name}": method
        for service in services
        for method in pool.FindServiceByName(service).methods
    }


async def call(target: str, path: str, message: Message, metadata: Any) -> tuple[str, bytes]:
    """Call a method with one message; returns the status code and the first response."""
    async with grpc.aio.insecure_channel(target) as channel:
        # All kinds of methods are equal on the wire.
        data = message.SerializeToString()
        stream = channel.unary_stream(path)(data, metadata=metadata, timeout=TIMEOUT_S)
        first = b""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (data := await stream.read()) is not grpc.aio.EOF:
                first = first or data
        return str((await stream.code()).name), first


def message_of(method: Any) -> Message:
    """An empty request message of a method."""
    return message_factory.GetMessageClass(method.input_type)()


async def test_every_method_is_refused_without_a_key_except_health(case: Case, keys: Keys) -> None:
    methods = await methods_of(case.target, keys.client)
    services = {f"{path.rpartition('/')[0]}/" for path in methods}
    assert services == {GATEWAY, KSERVE, HEALTH, REFLECTION}
    wrong: list[Any] = [(), (("authorization", "Bearer wrong"),), (("authorization", keys.client),)]
    for metadata in wrong:
        for path, method in methods.items():
            if path != ENDLESS:
                code, _ = await call(case.target, path, message_of(method), metadata)
                assert (code == "UNAUTHENTICATED") is not path.startswith(HEALTH), (path, code)
        for path in (f"{GATEWAY}Nothing", "/a.B/C", "/"):
            code, _ = await call(case.target, path, health_pb2.HealthCheckRequest(), metadata)
            assert code == "UNAUTHENTICATED", path


async def test_keys_are_accepted_in_the_same_two_headers_over_http_and_grpc(
    case: Case, keys: Keys
) -> None:
    bad, good = "Bearer wrong", f"Bearer {keys.client}"
    del case.http.headers["authorization"]
    shown: list[tuple[dict[str, str], bool]] = [
        ({"x-api-key": keys.client}, True),
        ({"authorization": good, "x-api-key": "wrong"}, True),
        ({"authorization": bad, "x-api-key": keys.client}, False),
        ({"x-api-key": "wrong"}, False),
    ]
    for headers, known in shown:
        answer = await case.http.get("/v1/models", headers=headers)
        assert (answer.status_code == 200) is known, headers
        metadata = tuple(headers.items())
        path = f"{GATEWAY}ListModels"
        code, _ = await call(case.target, path, pb.ListModelsRequest(), metadata)
        assert (code == "OK") is known, headers


class Gets(NamedTuple):
    """The expected result with the key of another model: a code, and a check of the response."""

    code: str
    answer: Message | None = None


MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = pb.ChatRequest(model="m", messages=[pb.Message(role=pb.ROLE_USER, text="hi")])
COMPLETION = pb.CompleteRequest(model="m", prompts=[pb.Prompt(text="hi")])
TENSOR = kpb.ModelInferRequest.InferInputTensor(
    name="text_input",
    datatype="BYTES",
    shape=[1],
    contents=kpb.InferTensorContents(bytes_contents=[b"hi"]),
)
INFERENCE = kpb.ModelInferRequest(model_name="m", inputs=[TENSOR])
REFUSED = "this key may not use the model 'm'; request another key"
NO, FINE = Gets("PERMISSION_DENIED"), Gets("OK")
FOREIGN: dict[str, tuple[Message, Gets]] = {
    f"{GATEWAY}Chat": (CHAT, NO),
    f"{GATEWAY}StreamChat": (pb.StreamChatRequest(chat=CHAT), NO),
    f"{GATEWAY}Complete": (COMPLETION, NO),
    f"{GATEWAY}StreamComplete": (pb.StreamCompleteRequest(completion=COMPLETION), NO),
    f"{GATEWAY}Tokenize": (pb.TokenizeRequest(model="m", text="hi"), NO),
    f"{GATEWAY}Detokenize": (pb.DetokenizeRequest(model="m", token_ids=[5]), NO),
    f"{GATEWAY}ListModels": (pb.ListModelsRequest(), Gets("OK", pb.ListModelsResponse())),
    f"{GATEWAY}Cancel": (pb.CancelRequest(request_id="mine"), Gets("OK", pb.CancelResponse())),
    f"{KSERVE}ServerLive": (kpb.ServerLiveRequest(), FINE),
    f"{KSERVE}ServerReady": (kpb.ServerReadyRequest(), FINE),
    f"{KSERVE}ServerMetadata": (kpb.ServerMetadataRequest(), FINE),
    f"{KSERVE}ModelReady": (
        kpb.ModelReadyRequest(name="m"),
        Gets("OK", kpb.ModelReadyResponse(ready=False)),
    ),
    f"{KSERVE}ModelMetadata": (kpb.ModelMetadataRequest(name="m"), Gets("NOT_FOUND")),
    f"{KSERVE}ModelConfig": (kpb.ModelConfigRequest(name="m"), Gets("NOT_FOUND")),
    f"{KSERVE}ModelInfer": (INFERENCE, NO),
    f"{KSERVE}ModelStreamInfer": (
        INFERENCE,
        Gets("OK", kpb.ModelStreamInferResponse(error_message=REFUSED)),
    ),
    f"{REFLECTION}ServerReflectionInfo": (
        reflection_pb2.ServerReflectionRequest(list_services=""),
        FINE,
    ),
}


async def test_methods_called_with_a_key_of_another_model(case: Case, keys: Keys) -> None:
    methods = await methods_of(case.target, keys.client)
    served = {path for path in methods if not path.startswith(HEALTH)}
    assert served == FOREIGN.keys(), "say what a key of another model gets"
    worker = case.paused(2)
    mine = AsyncClient(case.target, api_key=keys.client, timeout_s=TIMEOUT_S)
    async with mine, mine.stream_chat("hi", model="m", request_id="mine", max_tokens=4) as stream:
        await anext(stream)
        for path, (message, wanted) in FOREIGN.items():
            metadata = tuple(bearer(keys.foreign).items())
            code, data = await call(case.target, path, message, metadata)
            assert code == wanted.code, path
            if wanted.answer is not None:
                answer = type(wanted.answer).FromString(data)
                if isinstance(answer, kpb.ModelStreamInferResponse):
                    answer.ClearField("infer_response")
                assert answer == wanted.answer, path
        worker.go.set()
        pieces = [piece async for piece in stream]
    assert pieces[-1].usage.completion_tokens == 4, "it was not cancelled"
    assert len(worker.starts) == 1


# HTTP routes that take a body: body and status.
FOREIGN_HTTP: dict[str, tuple[dict[str, Any], int]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, 403),
    "/v1/completions": ({"prompt": "hi"}, 403),
    "/v1/responses": ({"input": "hi"}, 403),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 1}, 403),
    "/v1/messages/count_tokens": ({"messages": MESSAGES}, 403),
    "/tokenize": ({"prompt": "hi"}, 403),
    "/detokenize": ({"tokens": [5]}, 403),
    # Unknown to every gateway.
    "/v1/embeddings": ({"input": "hi"}, 400),
    "/v1/requests/{request_id:path}/cancel": ({}, 200),
    # Probes need no key.
    "/ping": ({}, 200),
    # No batch store here; a batch's lines are checked by its validation.
    "/v1/files": ({}, 501),
    "/v1/files/{rest:path}": ({}, 501),
    "/v1/batches": ({}, 501),
    "/v1/batches/{rest:path}": ({}, 501),
}


async def test_routes_called_with_a_key_of_another_model(
    case: Case, apps: list[Any], keys: Keys
) -> None:
    posts = {route.path for route in routes_of(apps[0]) if "POST" in (route.methods or ())}
    assert posts == FOREIGN_HTTP.keys(), "say what a key of another model gets"
    headers = bearer(keys.foreign)
    for path, (body, status) in FOREIGN_HTTP.items():
        url = path.replace("{request_id:path}", "mine").replace("{rest:path}", "mine")
        answer = await case.http.post(url, json={"model": "m"} | body, headers=headers)
        assert answer.status_code == status, (path, answer.text)
    assert (await case.http.get("/v1/models", headers=headers)).json()["data"] == []
    assert (await case.http.get("/v1/models/m", headers=headers)).status_code == 404
    assert (await case.http.get("/metrics", headers=headers)).status_code == 403
    assert not case.cluster.workers[0].starts
