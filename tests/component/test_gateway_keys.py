"""Keys of a file at a real gateway in front of fake services."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from services.common.etcd import Store
from services.core.quota.limits import QuotaLimits
from services.gateway.keys.key_file import ID_DIGITS, hash_of
from tests.support.exposition import samples, value
from tests.support.gateway import Case, gateway_case
from tests.support.secret_volume import SecretVolume
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key, revoke_keys
from tideserve.client import AsyncClient
from tideserve.client.errors import Unauthenticated

FILE = "keys.jsonl"
MERGE = "/tideserve/v1/groups/merge"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


@pytest.fixture
def client_key(keys: Path) -> str:
    return add_key(keys, "alice", False, None, QuotaLimits())


@pytest.fixture
def admin_key(keys: Path) -> str:
    return add_key(keys, "ops", True, None, QuotaLimits())


@pytest.fixture
async def case(
    store: Store, tmp_path: Path, keys: Path, client_key: str, admin_key: str
) -> AsyncIterator[Case]:
    async with gateway_case(store, tmp_path / "model", api_keys_file=keys) as case:
        yield case


async def test_client_keys_grant_no_access_to_metrics_or_the_admin_port(
    case: Case, client_key: str, admin_key: str
) -> None:
    for http, method, path in (
        (case.http, "GET", "/metrics"),
        (case.admin, "GET", "/metrics"),
        (case.admin, "GET", "/tideserve/v1/status"),
        (case.admin, "POST", MERGE),
        (case.admin, "POST", "/tideserve/v1/groups/split"),
    ):
        assert (await http.request(method, path)).status_code == 401, path
        mine = await http.request(method, path, headers=bearer(client_key))
        assert (mine.status_code, mine.json()["error"]["code"]) == (403, "forbidden"), path
        admins = await http.request(method, path, headers=bearer(admin_key))
        assert admins.status_code not in (401, 403), path


async def test_a_key_grants_access_to_its_models_only(
    case: Case, keys: Path, client_key: str
) -> None:
    allowed = add_key(keys, "bob", False, ["other", "m"], QuotaLimits())
    foreign = add_key(keys, "carol", False, ["other"], QuotaLimits())

    async def models(key: str) -> list[str] | None:
        answer = await case.http.get("/v1/models", headers=bearer(key))
        return [model["id"] for model in answer.json()["data"]] if answer.is_success else None

    assert await eventually(lambda: models(allowed)) == ["m"]
    assert await models(client_key) == ["m"] and await models(foreign) == []
    assert (await case.http.get("/v1/models/m", headers=bearer(foreign))).status_code == 404
    body = {"model": "m", "prompt": "hi", "max_tokens": 1}
    for key, status in ((allowed, 200), (foreign, 403), (client_key, 200)):
        answer = await case.http.post("/v1/completions", json=body, headers=bearer(key))
        assert answer.status_code == status


async def test_errors_do_not_name_the_model_to_other_keys(case: Case, keys: Path) -> None:
    foreign = add_key(keys, "carol", False, ["other"], QuotaLimits())

    async def known() -> bool:
        return (await case.http.get("/v1/models", headers=bearer(foreign))).is_success

    await eventually(known)
    for path, body in (
        ("/v1/embeddings", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = await case.http.post(path, json=body, headers=bearer(foreign))
        assert answer.status_code == 400 and "'m'" not in answer.text, path
    for name in ("m", "none"):
        body = {"model": name, "prompt": "hi"}
        for path in ("/v1/completions", "/tokenize"):
            answer = await case.http.post(path, json=body, headers=bearer(foreign))
            assert answer.status_code == 403, (path, name)


async def test_keys_rotate_under_load_without_a_failed_request(
    case: Case, keys: Path, client_key: str
) -> None:
    current, done = [client_key], [0]
    statuses: list[int] = []
    end = asyncio.Event()

    async def load() -> None:
        async with httpx.AsyncClient(base_url=case.url, timeout=60) as http:
            while not end.is_set():
                answer = await http.post(
                    "/v1/completions",
                    json={"model": "m", "prompt": "hi", "max_tokens": 4},
                    headers=bearer(current[0]),
                )
                statuses.append(answer.status_code)
                done[0] += answer.status_code == 200

    async def taken(key: str) -> bool:
        answer = await case.http.get("/v1/models", headers=bearer(key))
        return answer.status_code == 200

    async def refused(key: str) -> bool:
        return not await taken(key)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(load())
        for _ in range(3):
            old, new = current[0], add_key(keys, "alice", False, None, QuotaLimits())
            await eventually(lambda new=new: taken(new))
            current[0], before = new, done[0]
            # The requests with the old key have ended meanwhile.
            await eventually(lambda before=before: done[0] >= before + 20)
            revoke_keys(keys, [hash_of(old)[:ID_DIGITS]], None)
            await eventually(lambda old=old: refused(old))
        before = done[0]
        await eventually(lambda: done[0] >= before + 20)
        end.set()
    assert len(statuses) > 60 and set(statuses) == {200}


async def test_keys_in_a_kubernetes_secret_rotate_over_http_and_grpc(
    store: Store, tmp_path: Path
) -> None:
    made, admin = tmp_path / "made.jsonl", bearer("a" * 32)
    old = add_key(made, "alice", False, None, QuotaLimits())
    volume = SecretVolume(tmp_path / "mounted", {FILE: made.read_text()})
    settings = {"api_keys_file": tmp_path / "mounted" / FILE, "admin_key": "a" * 32}
    async with gateway_case(store, tmp_path / "model", sent_key=old, **settings) as case:

        async def over_http(key: str) -> bool:
            return (await case.http.get("/v1/models", headers=bearer(key))).is_success

        async def over_grpc(key: str) -> bool:
            async with AsyncClient(case.target, api_key=key) as client:
                try:
                    return bool(await client.models())
                except Unauthenticated:
                    return False

        async def file_refused() -> bool:
            metrics = samples((await case.admin.get("/metrics", headers=admin)).text)
            return value(metrics, "tideserve_gateway_keys_file_refused") == 1

        new = add_key(made, "alice", False, None, QuotaLimits())
        volume.update({FILE: made.read_text()})
        for let_in in (over_http, over_grpc):
            await eventually(lambda let_in=let_in: let_in(new))
            assert await let_in(old)
        # The file is invalid: the old keys stay valid, and a metric shows it.
        volume.update({FILE: "replace-me\n"})
        await eventually(file_refused)
        assert await over_http(new) and await over_grpc(old)
        revoke_keys(made, [hash_of(old)[:ID_DIGITS]], None)
        volume.update({FILE: made.read_text()})
        await eventually(lambda: refused_by(over_http, old))
        assert not await over_grpc(old) and await over_grpc(new)
        assert await over_http(new) and not await file_refused()


async def refused_by(let_in: Callable[[str], Awaitable[bool]], key: str) -> bool:
    return not await let_in(key)
