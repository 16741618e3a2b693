"""A gateway in front of fake services with two models of different tokenizers and templates."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from services.common.etcd import Store
from services.core.quota.limits import QuotaLimits
from services.gateway.batches.settings import BatchSettings
from tests.support.batches import as_file, chat_line, ended, results, submit
from tests.support.byte_tokenizer import (
    OTHER_VOCAB_SIZE,
    VOCAB_SIZE,
    byte_tokenizer,
    write_model_folder,
    write_other_model_folder,
)
from tests.support.client import open_client
from tests.support.exposition import samples, value
from tests.support.fake_cluster import FakeWorker, fake_cluster
from tests.support.gateway import TEXT, TIMEOUT_S, Case, endless, gateway_before
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key
from tideserve.client import AsyncClient
from tideserve.client.errors import ModelNotFound
from tideserve.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from tideserve.kserve.v2 import inference_pb2 as pb
from tideserve.kserve.v2 import inference_pb2_grpc
from tideserve.scheduler.v1 import scheduler_pb2

TEXTS = {"m": TEXT, "n": "Ebb and flow. "}
TOKENIZERS = {"m": byte_tokenizer(), "n": byte_tokenizer(other=True)}
LENGTHS = {"m": 256, "n": 128}
# The names of each model: its name and an alias.
NAMES = {"m": "m", "first": "m", "n": "n", "second": "n"}
OTHER = {"m": "n", "n": "m"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOKENS = 20


def ids_of(model: str, text: str) -> list[int]:
    return list(TOKENIZERS[model].encode(text).ids)


def prompt_of(case: "Models", model: str) -> str:
    """The text of the newest prompt at the worker of a model."""
    (worker,) = (w for w in case.gateway.cluster.workers if w.model == model)
    ids = list(worker.starts[-1].prompt_ids)
    return str(TOKENIZERS[model].decode(ids, skip_special_tokens=False))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Models:
    """The gateway, and keys for `m`, `n`, both, neither, and an operator."""

    gateway: Case
    keys: dict[str, str]

    async def post(self, path: str, body: dict[str, Any], key: str = "both") -> httpx.Response:
        return await self.gateway.http.post(path, json=body, headers=bearer(self.keys[key]))

    async def get(self, path: str, key: str = "both") -> httpx.Response:
        return await self.gateway.http.get(path, headers=bearer(self.keys[key]))


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Models]:
    file = tmp_path / "keys.jsonl"
    allowed = {"m": ["m"], "n": ["n"], "both": None, "neither": ["another"]}
    keys = {
        name: add_key(file, name, False, models, QuotaLimits(tokens_per_minute=100_000))
        for name, models in allowed.items()
    }
    keys["ops"] = add_key(file, "ops", True, None, QuotaLimits())
    other = FakeWorker("other", lambda _: ids_of("n", TEXTS["n"]) * 20, "n")
    other.record["max_model_len"] = LENGTHS["n"]
    models: list[dict[str, Any]] = [
        {"name": "m", "dir": str(write_model_folder(tmp_path / "m")), "aliases": ["first"]},
        {"name": "n", "dir": str(write_other_model_folder(tmp_path / "n")), "aliases": ["second"]},
    ]
    models[1]["quota_weight"] = 3
    async with (
        fake_cluster(store, endless, others=[other], max_model_len=LENGTHS["m"]) as cluster,
        gateway_before(
            cluster,
            tmp_path,
            keys["both"],
            models=tuple(models),
            expected_workers=1,
            ready_models="all",
            api_keys_file=file,
            batches=BatchSettings(batch_store=f"sqlite:///{tmp_path}/batches.db"),
        ) as gateway,
    ):
        yield Models(gateway, keys)


def text_in(path: str, answer: dict[str, Any]) -> str:
    """The output text of a response."""
    match path:
        case "/v1/completions":
            return str(answer["choices"][0]["text"])
        case "/v1/chat/completions":
            return str(answer["choices"][0]["message"]["content"])
        case "/v1/responses":
            return str(answer["output"][0]["content"][0]["text"])
    return str(answer["content"][0]["text"])


def begin_of(model: str) -> str:
    """The output of `TOKENS` tokens."""
    ids = ids_of(model, TEXTS[model] * 3)[:TOKENS]
    return str(TOKENIZERS[model].decode(ids))


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": TOKENS, "logprobs": 1},
    "/v1/chat/completions": {**CHAT, "max_tokens": TOKENS},
    "/v1/responses": {"input": "hi", "max_output_tokens": TOKENS},
    "/v1/messages": {**CHAT, "max_tokens": TOKENS},
}
PROMPTS = {
    "m": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "n": "<|turn|>user: hi\n<|turn|>assistant: ",
}


async def test_apis_serve_two_models_interleaved_on_a_connection(case: Models) -> None:
    """Also by alias; names alternate, so that consecutive requests use different models."""
    limits = httpx.Limits(max_connections=1)
    url, headers = case.gateway.url, bearer(case.keys["both"])
    async with httpx.AsyncClient(base_url=url, limits=limits, headers=headers) as http:
        for name in ("m", "second", "first", "n"):
            model = NAMES[name]
            for path, body in BODIES.items():
                answer = (await http.post(path, json={"model": name} | body)).json()
                assert text_in(path, answer) == begin_of(model), (name, path)
                assert answer["model"] == name
                wanted = "hi" if path == "/v1/completions" else PROMPTS[model]
                assert prompt_of(case, model) == wanted
            streamed = await http.post(
                "/v1/chat/completions",
                json={"model": name, "stream": True, "max_tokens": TOKENS, "logprobs": True} | CHAT,
            )
            chunks = [
                json.loads(line.removeprefix("data: "))["choices"][0]
                for line in streamed.text.splitlines()
                if line.startswith("data: {")
            ]
            assert "".join(c["delta"].get("content", "") for c in chunks) == begin_of(model)
            tokens = [e["token"] for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
            assert tokens[0] == begin_of(model)[0]
            ids = (await http.post("/tokenize", json={"model": name, "prompt": "hi"})).json()
            assert ids["tokens"] == ids_of(model, "hi") and ids["max_model_len"] == LENGTHS[model]
            text = await http.post("/detokenize", json={"model": name, "tokens": ids["tokens"]})
            assert text.json() == {"prompt": "hi"}
            count = await http.post("/v1/messages/count_tokens", json={"model": name, **CHAT})
            assert count.json() == {"input_tokens": len(ids_of(model, PROMPTS[model]))}
    missing = await case.post("/tokenize", {"prompt": "hi"})
    assert missing.status_code == 400 and "'model' is missing" in missing.text


async def test_concurrent_requests_of_both_models_do_not_mix(case: Models) -> None:
    names = [*NAMES] * 8

    async def ask(name: str) -> str:
        body = {"model": name, **BODIES["/v1/completions"], "max_tokens": 40}
        answer = (await case.post("/v1/completions", body)).json()
        return str(answer["choices"][0]["text"])

    for name, text in zip(names, await asyncio.gather(*map(ask, names)), strict=True):
        assert text.startswith(begin_of(NAMES[name]))


@pytest.mark.parametrize("name", NAMES)
async def test_limits_are_those_of_the_model(case: Models, name: str) -> None:
    model = NAMES[name]
    size = {"m": VOCAB_SIZE, "n": OTHER_VOCAB_SIZE}[model]
    body = {"model": name, "prompt": "hi", "max_tokens": 4}
    for fields in ({"logit_bias": {str(size - 1): 5}}, {"prompt": [size - 1]}):
        assert (await case.post("/v1/completions", body | fields)).status_code == 200
    for fields in ({"logit_bias": {str(size): 5}}, {"prompt": [size]}):
        assert (await case.post("/v1/completions", body | fields)).status_code == 400
    length = LENGTHS[model]
    assert (
        await case.post("/v1/completions", body | {"max_tokens": length - 2})
    ).status_code == 200
    refused = await case.post("/v1/completions", body | {"max_tokens": length - 1})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert f"{length} tokens" in refused.text
    outside = await case.post("/detokenize", {"model": name, "tokens": [size]})
    assert outside.status_code == 400 and str(size) in outside.text


async def test_grammars_name_special_tokens_of_the_model(case: Models) -> None:
    grammar = {"structured_outputs": {"grammar": 'start: "a" <|turn|>'}}
    for name, status in (("first", 400), ("second", 200)):
        body = {"model": name, "prompt": "hi", "max_tokens": 4} | grammar
        answer = await case.post("/v1/completions", body)
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("mine", ["m", "n"])
async def test_a_key_of_a_model_sees_no_other(case: Models, mine: str) -> None:
    other, alias = OTHER[mine], {"m": "first", "n": "second"}[mine]
    listed = (await case.get("/v1/models", mine)).json()["data"]
    assert [row["id"] for row in listed] == [mine, alias]
    assert {row["max_model_len"] for row in listed} == {LENGTHS[mine]}
    assert (await case.get(f"/v1/models/{other}", mine)).status_code == 404
    for path, body in (*BODIES.items(), ("/tokenize", {"prompt": "hi"})):
        unknown = await case.post(path, {**body, "model": "none"}, mine)
        hidden = await case.post(path, {**body, "model": other}, mine)
        assert unknown.status_code == hidden.status_code == 404
        # Like a model that does not exist.
        shown, wanted = (r.json()["error"]["message"] for r in (hidden, unknown))
        assert shown.replace(f"'{other}'", "'none'") == wanted
        assert shown.endswith(f"this server has '{mine}'")
        assert (await case.post(path, {**body, "model": alias}, mine)).status_code == 200
        foreign = await case.post(path, {**body, "model": mine}, "neither")
        assert foreign.status_code == 403
    both = (await case.get("/v1/models")).json()["data"]
    assert [row["id"] for row in both] == ["m", "first", "n", "second"]
    assert [row["root"] for row in both] == ["m", "m", "n", "n"]


async def test_grpc_and_kserve_know_the_models_of_the_key(case: Models) -> None:
    for mine in ("m", "n"):
        other, key = OTHER[mine], case.keys[mine]
        async with AsyncClient(case.gateway.target, api_key=key, timeout_s=TIMEOUT_S) as client:
            models = await client.models()
            assert [m.root for m in models] == [mine, mine] and models[0].id == mine
            answer = await client.complete("hi", model=mine, max_tokens=TOKENS)
            assert answer.choices[0].text == begin_of(mine)
            with pytest.raises(ModelNotFound):
                await client.complete("hi", model=other, max_tokens=TOKENS)
        async with grpc.aio.insecure_channel(case.gateway.target) as channel:
            stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = [("authorization", f"Bearer {key}")]
            for name, ready in ((mine, True), (other, False)):
                request = pb.ModelReadyRequest(name=name)
                assert (await stub.ModelReady(request, metadata=metadata)).ready is ready
            described = await stub.ModelMetadata(
                pb.ModelMetadataRequest(name=mine), metadata=metadata
            )
            assert described.name == mine
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.ModelMetadata(pb.ModelMetadataRequest(name=other), metadata=metadata)
            assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_readiness_by_model(case: Models) -> None:
    cluster = case.gateway.cluster
    assert (await case.gateway.http.get("/ready?model=second")).status_code == 200
    cluster.scheduler.workers = cluster.workers[:1]
    await eventually(_answers(case, "/ready?model=n", 503))
    for path, status in (
        *(("/ready?model=first", 200), ("/ready?model=unknown", 503)),
        # The configuration needs all models.
        *(("/ready", 503), ("/health", 200)),
    ):
        assert (await case.gateway.http.get(path)).status_code == status, path
    rows = samples((await case.get("/metrics", "ops")).text)
    for model, ready in (("m", 1), ("n", 0)):
        assert value(rows, "tideserve_gateway_model_ready", model_name=model) == ready
        assert value(rows, "tideserve_gateway_groups_serving", model_name=model) == ready
    unknown = (await case.gateway.http.get("/ready?model=unknown")).json()
    assert unknown["missing"] == ["no group of the model is stable"]


def _answers(case: Models, path: str, status: int) -> Any:
    async def answers() -> bool:
        return (await case.gateway.http.get(path)).status_code == status

    return answers


async def test_a_model_without_workers_is_unavailable_and_an_unknown_name_not_found(
    case: Models,
) -> None:
    case.gateway.cluster.scheduler.refusal = scheduler_pb2.Refusal(
        reason=scheduler_pb2.REFUSAL_REASON_UNKNOWN_MODEL,
        message="no worker serves it",
        retry_after_s=10,
    )
    for path, body in BODIES.items():
        answer = await case.post(path, {**body, "model": "second"})
        # Anthropic's API has a status of its own for it.
        assert answer.status_code == (529 if path == "/v1/messages" else 503), path
        assert int(answer.headers["retry-after"]) >= 10
        assert answer.json()["error"]["message"] == "no worker serves it"
        assert (await case.post(path, {**body, "model": "third"})).status_code == 404, path
    metadata = [("authorization", f"Bearer {case.keys['both']}")]
    text = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"hi")
    options = [("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(case.gateway.target, options=options) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        kserve: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, code in (
            ("second", grpc.StatusCode.UNAVAILABLE),
            ("third", grpc.StatusCode.NOT_FOUND),
        ):
            prompt = gateway_pb2.Prompt(text="hi")
            complete = gateway_pb2.CompleteRequest(model=name, prompts=[prompt])
            infer = pb.ModelInferRequest(model_name=name, inputs=[text])
            for call in (
                stub.Complete(complete, metadata=metadata),
                kserve.ModelInfer(infer, metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is code


async def test_lines_of_a_batch_name_several_models(case: Models) -> None:
    lines = [chat_line(number, model=name) for number, name in enumerate([*NAMES] * 2)]
    async with open_client(case.gateway.url, case.keys["both"]) as client:
        batch = await ended(client, (await submit(client, as_file(lines))).id)
        answers = await results(client, batch.output_file_id)
    for line, answer in zip(lines, answers, strict=True):
        body, name = answer["response"]["body"], line["body"]["model"]
        assert body["model"] == name
        assert body["choices"][0]["message"]["content"] == begin_of(NAMES[name])[:12]
    async with open_client(case.gateway.url, case.keys["m"]) as client:
        batch = await ended(client, (await submit(client, as_file(lines))).id)
        assert batch.status == "failed"
        assert {error.code for error in batch.errors.data} == {"model_not_found"}


async def test_an_idempotency_key_is_shared_by_all_names_of_a_model(case: Models) -> None:
    async def ask(name: str, number: str, **fields: Any) -> httpx.Response:
        headers = {"idempotency-key": number} | bearer(case.keys["both"])
        body = {"model": name, "prompt": "hi", "max_tokens": 4} | fields
        return await case.gateway.http.post("/v1/completions", json=body, headers=headers)

    first, again = await ask("m", "k1"), await ask("first", "k1")
    assert again.json() == first.json() and again.headers["idempotent-replayed"] == "true"
    assert (await ask("n", "k1")).status_code == 409
    assert (await ask("first", "k1", max_tokens=5)).status_code == 409


async def test_metrics_and_quotas_by_model(case: Models) -> None:
    for name, tokens in (("first", 5), ("n", 7)):
        body = {"model": name, "prompt": "hi", "max_tokens": tokens}
        answer = await case.post("/v1/completions", body)
        assert answer.status_code == 200
    rows = samples((await case.get("/metrics", "ops")).text)
    for model, tokens in (("m", 5), ("n", 7)):
        for name, wanted in (
            *(("vllm:request_generation_tokens_sum", tokens), ("vllm:request_params_n_sum", 1)),
            ("tideserve_gateway_output_tokens_total", tokens),
            ("tideserve_gateway_prompt_tokens_total", 2),
        ):
            assert value(rows, name, model_name=model) == wanted, name
    usage = value(rows, "tideserve_gateway_quota_used_total", owner="both", limit="tokens")
    # A token of the second model costs three.
    assert usage == 2 + 5 + 3 * (2 + 7)
