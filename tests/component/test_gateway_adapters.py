"""LoRA adapters at a real gateway in front of fake services: loaded, used as models, unloaded."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.etcd import Store
from services.common.membership import ADAPTERS, WORKERS
from services.common.records import decode_record
from services.core.prefix.block_hash import tenant_salt
from services.core.quota.limits import QuotaLimits
from tests.support.control_plane import put
from tests.support.gateway import Case, gateway_before, gateway_case
from tests.support.tiny_adapters import make_tiny_adapter
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key
from tideserve.common.v1 import adapter_pb2, record_pb2
from tideserve.worker.v1 import worker_pb2

LIMITS = adapter_pb2.AdapterLimits(slots=2, rank_max=16)
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A function that writes the folder of an adapter below the root."""

    def make(name: str, **config: Any) -> Path:
        return make_tiny_adapter(tmp_path / "adapters" / name, SIZES, **config)

    return make


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    (tmp_path / "adapters").mkdir()
    roots = (str(tmp_path / "adapters"),)
    async with gateway_case(
        store, tmp_path / "model", adapters=LIMITS, workers=2, adapter_roots=roots
    ) as case:
        yield case


async def load(case: Case, name: str, folder: Path, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder)} | fields
    return await case.admin.post("/v1/load_lora_adapter", json=body)


async def unload(case: Case, name: str) -> httpx.Response:
    return await case.admin.post("/v1/unload_lora_adapter", json={"lora_name": name})


def started(case: Case) -> list[worker_pb2.Start]:
    return [start for worker in case.cluster.workers for start in worker.starts]


async def models(case: Case) -> dict[str, dict[str, Any]]:
    listed = (await case.http.get("/v1/models")).json()["data"]
    return {model["id"]: model for model in listed}


async def test_an_adapter_is_a_model_until_it_is_unloaded(case: Case, make: Make) -> None:
    answer = await load(case, "tone", make("tone"))
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'tone' added successfully."
    listed = await models(case)
    assert (listed["tone"]["parent"], listed["tone"]["root"]) == ("m", str(make("tone")))
    assert listed["m"]["parent"] is None
    described = (await case.http.get("/v1/models/tone")).json()
    assert described == listed["tone"]

    answer = await case.complete(model="tone", max_tokens=4)
    assert answer.status_code == 200 and answer.json()["model"] == "tone"
    (start,) = started(case)
    assert (start.adapter.name, start.adapter.rank) == ("tone", 8)
    assert start.adapter.source == str(make("tone"))
    assert start.cache_salt == tenant_salt("", "", start.adapter.digest)
    (ask,) = case.cluster.scheduler.asks
    assert ask.model == "m" and ask.adapter == start.adapter

    assert (await unload(case, "tone")).status_code == 200
    assert "tone" not in await models(case)
    assert (await case.complete(model="tone")).status_code == 404
    assert (await unload(case, "tone")).status_code == 404


async def test_the_model_without_an_adapter_is_unchanged(case: Case, make: Make) -> None:
    await load(case, "tone", make("tone"))
    assert (await case.complete(max_tokens=4)).status_code == 200
    (start,) = started(case)
    assert not start.HasField("adapter") and start.cache_salt == ""
    assert not case.cluster.scheduler.asks[0].HasField("adapter")


async def test_all_apis_accept_an_adapter_as_model(case: Case, make: Make) -> None:
    await load(case, "tone", make("tone"))
    message = {"role": "user", "content": "hi"}
    paths = {
        "/v1/chat/completions": {"messages": [message]},
        "/v1/messages": {"messages": [message], "max_tokens": 4},
        "/v1/responses": {"input": "hi"},
    }
    for path, body in paths.items():
        answer = await case.http.post(path, json={"model": "tone"} | body)
        assert (answer.status_code, answer.json()["model"]) == (200, "tone"), path
    grpc = await case.grpc.complete("hi", model="tone", max_tokens=4)
    assert grpc.model == "tone"
    assert [start.adapter.name for start in started(case)] == ["tone"] * 4
    answer = await case.http.post("/tokenize", json={"model": "tone", "prompt": "hi"})
    assert answer.status_code == 200


async def test_replacing_weights_needs_a_flag_and_running_requests_keep_theirs(
    case: Case, make: Make
) -> None:
    folder = make("tone", seed=1)
    await load(case, "tone", folder)
    assert (await load(case, "tone", folder)).status_code == 200, "nothing has changed"
    workers = case.cluster.workers
    for worker in workers:
        worker.pause_at = 2
    running = asyncio.create_task(case.complete(model="tone", max_tokens=8))
    await eventually(lambda: len(started(case)) == 1)
    first = started(case)[0]

    make("tone", seed=2)
    answer = await load(case, "tone", folder)
    assert answer.status_code == 400 and "'load_inplace': true" in answer.text
    assert (await load(case, "tone", folder, load_inplace=True)).status_code == 200
    # The request's worker is lost: it resumes with its original weights.
    at = next(worker for worker in workers if worker.starts)
    at.failure, at.kv_lost, at.fails_after = worker_pb2.FINISH_REASON_RETURNED, True, 2
    for worker in workers:
        worker.pause_at = None
        worker.go.set()
    assert (await running).status_code == 200
    resumed = [start for start in started(case) if start.output_ids]
    assert resumed and all(start.adapter == first.adapter for start in resumed)
    at.fails_after = None

    await case.complete(model="tone", max_tokens=4)
    latest = max(started(case), key=lambda start: start.request_id not in (first.request_id,))
    assert latest.adapter.digest != first.adapter.digest
    assert latest.cache_salt != first.cache_salt


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_name": "m"}, "'m' is the name of a model"),
        ({"lora_name": "alias"}, "'alias' is the name of a model"),
        ({"base": "other"}, "'other' is no model of this gateway"),
        ({"lora_path": "/etc"}, "is not below any of 'adapter_roots'"),
        ({"lora_path": "adapters/tone"}, "must be an absolute path"),
        ({"lora_name": ""}, "'lora_name'"),
        ({"lora_name": "a\nb"}, "printable characters"),
        ({"lora_name": "tone "}, "printable characters"),
        ({"lora_path": None}, "'lora_path'"),
        ({"rank": 3}, "'rank': extra inputs"),
    ],
)
async def test_invalid_loads_are_refused(
    store: Store, tmp_path: Path, make: Make, fields: dict[str, Any], message: str
) -> None:
    folder = make("tone")
    roots = (str(tmp_path / "adapters"),)
    async with gateway_case(
        store, tmp_path / "model", adapters=LIMITS, adapter_roots=roots, model_aliases="alias"
    ) as case:
        answer = await load(case, "tone", folder, **fields)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
        assert not await store.list_prefix(ADAPTERS)


async def test_an_idempotency_key_is_specific_to_the_adapter(
    store: Store, tmp_path: Path, make: Make
) -> None:
    roots = (str(tmp_path / "adapters"),)
    async with gateway_case(
        store, tmp_path / "model", adapters=LIMITS, adapter_roots=roots, model_aliases="alias"
    ) as case:
        await load(case, "tone", make("tone"))
        statuses = []
        for name in ("m", "tone", "alias"):
            body = {"model": name, "prompt": "hi", "max_tokens": 2}
            headers = {"idempotency-key": "once"}
            answer = await case.http.post("/v1/completions", json=body, headers=headers)
            statuses.append((answer.status_code, answer.headers.get("idempotent-replayed")))
        assert statuses == [(200, None), (409, None), (200, "true")]
        assert len(started(case)) == 1


async def test_the_number_of_adapters_is_limited(
    case: Case, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.serving.adapter_loader.ADAPTERS_MAX", 1)
    assert (await load(case, "tone", make("tone"))).status_code == 200
    refused = await load(case, "other", make("other"))
    assert refused.status_code == 400 and "unload one" in refused.json()["error"]["message"]
    # It can be replaced.
    answer = await load(case, "tone", make("other"), load_inplace=True)
    assert answer.status_code == 200
    await unload(case, "tone")
    assert (await load(case, "other", make("other"))).status_code == 200


async def test_a_folder_that_does_not_fit_is_refused(case: Case, make: Make) -> None:
    wide = await load(case, "wide", make("wide", rank=32))
    assert wide.status_code == 400 and "load up to 16" in wide.json()["error"]["message"]
    dora = await load(case, "dora", make("dora", use_dora=True))
    assert dora.status_code == 400 and "DoRA" in dora.json()["error"]["message"]
    none = await load(case, "none", make("tone").parent / "none")
    assert none.status_code == 400 and "cannot be read" in none.json()["error"]["message"]


async def test_without_roots_nothing_is_loaded(store: Store, tmp_path: Path, make: Make) -> None:
    async with gateway_case(store, tmp_path / "model", adapters=LIMITS) as case:
        answer = await load(case, "tone", make("tone"))
        assert answer.status_code == 400 and "'adapter_roots'" in answer.text


async def test_other_gateways_learn_of_adapters(case: Case, make: Make, tmp_path: Path) -> None:
    async with gateway_before(case.cluster, tmp_path / "model", expected_workers=2) as other:
        await load(case, "a/b %", make("tone"))
        await eventually(lambda: listed_at(other, "a/b %"))
        answer = await other.complete(model="a/b %", max_tokens=4)
        assert answer.status_code == 200
        await unload(case, "a/b %")

        async def gone() -> bool:
            return not await listed_at(other, "a/b %")

        await eventually(gone)


async def listed_at(case: Case, name: str) -> bool:
    return name in await models(case)


async def test_a_worker_of_the_previous_version_gets_no_adapter(
    store: Store, tmp_path: Path, make: Make
) -> None:
    make("tone")
    # A scheduler of the previous version assigns to any worker, as the fake does.
    roots = (str(tmp_path / "adapters"),)
    async with gateway_case(store, tmp_path / "model", adapter_roots=roots) as case:
        assert (await load(case, "tone", make("tone"))).status_code == 200
        answer = await case.complete(model="tone", max_tokens=4)
        assert answer.status_code == 503 and "upgrade the scheduler" in answer.text
        assert not started(case)
        assert (await case.complete(max_tokens=4)).status_code == 200


async def test_a_successor_at_the_same_address_gets_no_adapter(
    store: Store, case: Case, make: Make
) -> None:
    assert (await load(case, "tone", make("tone"))).status_code == 200
    # As after a downgrade: records of the former worker and of its successor.
    for key, entry in (await store.list_prefix(WORKERS)).items():
        record = decode_record(record_pb2.WorkerRecord, entry.value)
        assert record is not None and record.adapters.slots
        record.ClearField("adapters")
        record.worker_id += "-old"
        await put(store, f"{key}-old", record)

    refused_at: set[str] = set()  # workers of which the gateway has seen two records

    async def refused() -> bool:
        answer = await case.complete(model="tone", max_tokens=2)
        if answer.status_code == 503:
            refused_at.add(answer.json()["error"]["message"].split()[0])
        return answer.status_code == 503

    async def refused_everywhere() -> bool:
        await refused()
        return len(refused_at) == len(case.cluster.workers)

    await eventually(refused_everywhere)
    before = len(started(case))
    assert await refused() and len(started(case)) == before
    assert (await case.complete(max_tokens=2)).status_code == 200


async def test_keys_for_the_model_or_the_adapter_grant_access(
    store: Store, tmp_path: Path, make: Make
) -> None:
    keys, folder = tmp_path / "keys.jsonl", make("tone")
    admin = add_key(keys, "ops", True, None, QuotaLimits())
    owners = {"all": None, "model": ["m"], "adapter": ["tone"], "other": ["x"]}
    of = {name: add_key(keys, name, False, may, QuotaLimits()) for name, may in owners.items()}
    roots = (str(tmp_path / "adapters"),)
    async with gateway_case(
        store, tmp_path / "model", adapters=LIMITS, api_keys_file=keys, adapter_roots=roots
    ) as case:
        assert (await load(case, "tone", folder)).status_code == 401
        for key, status in ((of["all"], 403), (admin, 200)):
            case.admin.headers["authorization"] = f"Bearer {key}"
            assert (await load(case, "tone", folder)).status_code == status
        status_of = {}
        for name, key in of.items():
            case.http.headers["authorization"] = f"Bearer {key}"
            answers = [await case.complete(model=model, max_tokens=2) for model in ("m", "tone")]
            status_of[name] = [answer.status_code for answer in answers]
            allowed = {"m", "tone"} if name in ("all", "model") else {"tone"} - {name}
            assert set(await models(case)) == (allowed if name != "other" else set())
        assert status_of.pop("all") == status_of.pop("model") == [200, 200]
        assert status_of["adapter"][1] == 200
        refused = [status_of["adapter"][0], *status_of["other"]]
        assert all(status in (403, 404) for status in refused)
        salts = {start.cache_salt for start in started(case)}
        assert len(salts) == 5, "owners and adapters share nothing"
