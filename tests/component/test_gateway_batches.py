"""Files and batches at a real gateway in front of fake services, with the official client."""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Batch
from openai.types.batch_request_counts import BatchRequestCounts

from services.common.etcd import Store
from services.core.quota.limits import QuotaLimits
from services.gateway.batches import leader
from services.gateway.batches.errors import BatchStoreDown
from services.gateway.batches.line_store import LineStore
from services.gateway.batches.rows import ClaimedLine
from services.gateway.batches.settings import BatchSettings
from services.gateway.http.files_routes import OWNER_TRANSFERS_MAX, _Transfers
from services.gateway.vocabulary.errors import QueueFull
from tests.support.batches import (
    CHAT,
    as_file,
    chat_line,
    chat_lines,
    check_answers,
    comparable,
    ended,
    results,
    submit,
)
from tests.support.client import open_client
from tests.support.exposition import samples
from tests.support.gateway import Case, gateway_case
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key, revoke_keys


def settings(folder: Path, **fields: object) -> BatchSettings:
    return BatchSettings(batch_store=f"sqlite:///{folder}/batches.db", **fields)


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    async with gateway_case(store, tmp_path / "model", batches=settings(tmp_path)) as case:
        yield case


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


async def test_lines_get_the_response_of_the_same_request_in_input_order(case: Case) -> None:
    lines = chat_lines(20)
    batch = await submit(case.openai, as_file(lines))
    assert batch.status == "validating" and batch.input_file_id.startswith("file-")
    batch = await ended(case.openai, batch.id)
    assert batch.status == "completed" and batch.error_file_id is None
    assert (batch.request_counts.total, batch.request_counts.completed) == (20, 20)
    answers = await results(case.openai, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
    for answer, line in zip(answers, lines, strict=True):
        asked = await case.http.post(CHAT, json=line["body"] | {"slo_class": "batch"})
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert comparable(answer["response"]["body"]) == comparable(asked.json())
    starts = case.cluster.workers[0].starts
    assert len({start.request_id for start in starts}) == 40


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 9}),
        ("/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 9}),
    ],
)
async def test_lines_of_other_endpoints(case: Case, endpoint: str, body: dict[str, object]) -> None:
    line = chat_line(0) | {"url": endpoint, "body": body}
    batch = await ended(case.openai, (await submit(case.openai, as_file([line]), endpoint)).id)
    (answer,) = await results(case.openai, batch.output_file_id)
    asked = (await case.http.post(endpoint, json=body | {"slo_class": "batch"})).json()
    written = answer["response"]["body"]
    assert written.keys() == asked.keys() and written["usage"] == asked["usage"]


async def test_an_invalid_line_fails_the_batch_before_any_runs(case: Case) -> None:
    lines = [*chat_lines(3), chat_line(1), chat_line(5, stream=True), chat_line(6, model="other")]
    batch = await ended(case.openai, (await submit(case.openai, as_file(lines))).id)
    assert batch.status == "failed"
    assert [error.line for error in batch.errors.data] == [4, 5, 6]
    assert not case.cluster.workers[0].starts
    with pytest.raises(openai.NotFoundError):
        await submit_id(case, "file-unknown")


async def submit_id(case: Case, file_id: str) -> None:
    await case.openai.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )


async def test_a_line_that_fails_is_in_the_error_file(case: Case) -> None:
    lines = [chat_line(0), chat_line(1, max_tokens=100_000), chat_line(2)]
    batch = await ended(case.openai, (await submit(case.openai, as_file(lines))).id)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    answers = await results(case.openai, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == ["line-0", "line-2"]
    (failed,) = await results(case.openai, batch.error_file_id)
    assert failed["custom_id"] == "line-1" and failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"


async def test_a_cancelled_batch_stops_its_lines_and_keeps_results(case: Case) -> None:
    worker = case.paused(5)
    batch = await submit(case.openai, as_file(chat_lines(40)))
    await eventually(lambda: len(worker.active) >= 16)
    assert (await case.openai.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(case.openai, batch.id)
    assert batch.status == "cancelled"
    await eventually(lambda: not worker.active)
    counts = batch.request_counts
    assert counts.completed + counts.failed == counts.total == 40
    errors = await results(case.openai, batch.error_file_id)
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    with pytest.raises(openai.NotFoundError):
        await case.openai.batches.cancel("batch_unknown")


async def test_refused_lines_are_retried(case: Case) -> None:
    case.refuse("full", retry_after_s=0.2)
    batch = await submit(case.openai, as_file(chat_lines(20)))
    await eventually(lambda: case.cluster.scheduler.asks)
    case.cluster.scheduler.refusal = None
    batch = await ended(case.openai, batch.id)
    assert batch.request_counts.completed == 20


async def test_a_lost_worker_loses_no_line(case: Case) -> None:
    worker = case.paused(5)
    batch = await submit(case.openai, as_file(chat_lines(20)))
    await eventually(lambda: len(worker.active) >= 16)
    worker.pause_at = None
    worker.hang_up()
    worker.go.set()
    batch = await ended(case.openai, batch.id)
    assert batch.request_counts.completed == 20


async def test_files_are_uploaded_listed_read_and_deleted(case: Case) -> None:
    content = as_file(chat_lines(30_000))
    ids = []
    for number in range(3):
        file = await case.openai.files.create(
            file=(f"input-{number}.jsonl", content), purpose="batch"
        )
        assert (file.bytes, file.filename) == (len(content), f"input-{number}.jsonl")
        ids.append(file.id)
    listed = [file.id async for file in case.openai.files.list(limit=2)]
    assert listed == ids[::-1]
    assert [file.id async for file in case.openai.files.list(order="asc", limit=1)] == ids
    assert (await case.openai.files.content(ids[0])).content == content
    assert (await case.openai.files.delete(ids[0])).deleted
    for call in (case.openai.files.retrieve, case.openai.files.delete, case.openai.files.content):
        with pytest.raises(openai.NotFoundError):
            await call(ids[0])


async def test_uploads_are_checked(case: Case) -> None:
    async def upload(**fields: str) -> httpx.Response:
        return await case.http.post("/v1/files", data=fields, files={"file": ("a", b"x")})

    assert (await upload(purpose="fine-tune")).json()["error"]["param"] == "purpose"
    assert (await upload(purpose="batch", padding="x" * 2000)).status_code == 400
    plain = await case.http.post("/v1/files", json={"purpose": "batch"})
    assert plain.status_code == 415
    form = {"content-type": "multipart/form-data; boundary=b"}
    for body in (b"", b"--b\r\n", b"no form", b"--b--\r\n"):
        cut = await case.http.post("/v1/files", content=body, headers=form)
        assert cut.status_code == 400, body


async def test_an_empty_file_is_refused(case: Case) -> None:
    with pytest.raises(openai.BadRequestError, match="the file is empty"):
        await case.openai.files.create(file=("a.jsonl", b""), purpose="batch")
    assert not (await case.openai.files.list()).data


async def test_a_download_without_its_storage_is_503(case: Case, tmp_path: Path) -> None:
    uploaded = await case.openai.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    for stored in (tmp_path / "files").rglob("*"):
        if stored.is_file():
            stored.unlink()
    answer = await case.http.get(f"/v1/files/{uploaded.id}/content")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "batch_store_unavailable"


async def test_a_truncated_stored_file_is_503(case: Case, tmp_path: Path) -> None:
    uploaded = await case.openai.files.create(file=("a.jsonl", b"x" * 2**19), purpose="batch")
    (stored,) = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    os.truncate(stored, 2**18)
    with pytest.raises(httpx.RemoteProtocolError):
        await case.http.get(f"/v1/files/{uploaded.id}/content")


@pytest.mark.parametrize("url", ["/v1/files/%00", "/v1/batches?after=%00", "/v1/files?limit=00001"])
async def test_urls_are_checked(case: Case, url: str) -> None:
    long = url.replace("00001", "0" * 10 + "1")
    assert (await case.http.get(long)).status_code == 400


async def test_a_batch_that_fails_validation_delays_no_other(case: Case, tmp_path: Path) -> None:
    uploaded = await case.openai.files.create(file=("a", as_file(chat_lines(2))), purpose="batch")
    for stored in (tmp_path / "files").rglob("*"):
        if stored.is_file():
            stored.unlink()
    stuck = await case.openai.batches.create(
        input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h"
    )
    other = await submit(case.openai, as_file(chat_lines(3)))
    assert (await ended(case.openai, other.id)).status == "completed"
    assert (await case.openai.batches.retrieve(stuck.id)).status == "validating"


def test_an_owner_cannot_use_all_transfers() -> None:
    transfers = _Transfers()
    with contextlib.ExitStack() as held:
        for _ in range(OWNER_TRANSFERS_MAX):
            held.enter_context(transfers.entered("a"))
        with pytest.raises(QueueFull), transfers.entered("a"):
            pass
        with transfers.entered("b"):
            pass
    with transfers.entered("a"):
        pass


async def test_a_file_beyond_the_limit_is_refused(store: Store, tmp_path: Path) -> None:
    small = settings(tmp_path, batch_file_bytes_max=2**20)
    async with gateway_case(store, tmp_path / "model", batches=small) as case:
        for size, status in ((2**20, 200), (2**20 + 1, 413), (2**22, 413)):
            answer = await case.http.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("a", bytes(size))}
            )
            assert answer.status_code == status
    assert len([path for path in (tmp_path / "files").rglob("*") if path.is_file()]) == 1


async def test_the_output_expires_after_the_requested_time(case: Case) -> None:
    content = as_file([chat_line(0), chat_line(1, max_tokens=100_000)])
    file = await case.openai.files.create(file=("input.jsonl", content), purpose="batch")
    created = {
        "input_file_id": file.id,
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    for expiry, name in (
        ({"anchor": "created_at", "seconds": 3599}, "seconds"),
        ({"anchor": "created_at", "seconds": 30 * 86_400 + 1}, "seconds"),
        ({"anchor": "completed_at", "seconds": 3600}, "anchor"),
        ({"anchor": "created_at"}, "seconds"),
    ):
        refused = await case.http.post(
            "/v1/batches", json={**created, "output_expires_after": expiry}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == f"output_expires_after.{name}"
    batch = await case.openai.batches.create(
        **created, output_expires_after={"anchor": "created_at", "seconds": 7200}
    )
    batch = await ended(case.openai, batch.id)
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert file_id is not None
        file = await case.openai.files.retrieve(file_id)
        assert file.expires_at is not None and file.purpose == "batch_output"
        assert file.expires_at - file.created_at in (7200, 7201)


async def test_the_batch_object_matches_the_official_client(case: Case) -> None:
    lines = [chat_line(0), chat_line(1, max_tokens=100_000), chat_line(2)]
    created = await submit(case.openai, as_file(lines))
    assert created.request_counts == BatchRequestCounts(total=0, completed=0, failed=0)
    batch = await ended(case.openai, created.id)
    assert batch.request_counts == BatchRequestCounts(total=3, completed=2, failed=1)
    answers = await results(case.openai, batch.output_file_id)
    usages = [answer["response"]["body"]["usage"] for answer in answers]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    # All fields except our `progress` match the API and its types.
    raw = (await case.http.get(f"/v1/batches/{batch.id}")).json()
    assert raw.keys() - Batch.model_fields.keys() == {"progress"}
    Batch.model_validate(raw, strict=True)
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert all(times) and times == sorted(times)
    assert batch.failed_at is batch.cancelled_at is batch.expired_at is None


async def test_a_repeated_idempotency_key_creates_one_batch(case: Case) -> None:
    file = await case.openai.files.create(
        file=("input.jsonl", as_file(chat_lines(2))), purpose="batch"
    )
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "1h"}
    headers = {"idempotency-key": "once"}
    first, second = [
        await case.http.post("/v1/batches", json=body, headers=headers) for _ in range(2)
    ]
    assert first.status_code == second.status_code == 200
    assert first.json()["id"] == second.json()["id"]
    other = await case.http.post(
        "/v1/batches", json=body | {"completion_window": "2h"}, headers=headers
    )
    assert other.status_code == 409
    listed = [batch.id async for batch in case.openai.batches.list(limit=1)]
    assert listed == [first.json()["id"]]


async def test_owners_see_only_their_own_files_and_batches(
    store: Store, tmp_path: Path, keys: Path
) -> None:
    mine, others = (add_key(keys, owner, False, None, QuotaLimits()) for owner in ("a", "b"))
    async with (
        gateway_case(
            store, tmp_path / "model", api_keys_file=keys, batches=settings(tmp_path)
        ) as case,
        open_client(case.url, mine) as owner,
        open_client(case.url, others) as stranger,
    ):
        batch = await ended(owner, (await submit(owner, as_file(chat_lines(2)))).id)
        assert batch.status == "completed" and batch.output_file_id is not None
        for call in (
            stranger.files.retrieve(batch.input_file_id),
            stranger.files.content(batch.output_file_id),
            stranger.files.delete(batch.output_file_id),
            stranger.batches.retrieve(batch.id),
            stranger.batches.cancel(batch.id),
            submit_as(stranger, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert not (await stranger.files.list()).data
        assert not (await stranger.batches.list()).data


async def submit_as(client: openai.AsyncOpenAI, file_id: str) -> None:
    await client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )


async def test_a_revoked_key_fails_its_lines(store: Store, tmp_path: Path, keys: Path) -> None:
    mine, _ = (add_key(keys, owner, False, None, QuotaLimits()) for owner in ("a", "b"))
    async with (
        gateway_case(
            store,
            tmp_path / "model",
            api_keys_file=keys,
            batches=settings(tmp_path, batch_window=2),
        ) as case,
        open_client(case.url, mine) as client,
    ):
        worker = case.paused(5)
        batch = await submit(client, as_file(chat_lines(10)))
        await eventually(lambda: len(worker.active) == 2)
        revoke_keys(keys, [], "a")

        async def refused() -> bool:
            answer = await case.http.get("/v1/models", headers={"authorization": f"Bearer {mine}"})
            return answer.status_code == 401

        await eventually(refused)
        worker.pause_at = None
        worker.go.set()
        # The owner gets a new key.
        renewed = add_key(keys, "a", False, None, QuotaLimits())

        async def accepted() -> bool:
            answer = await case.http.get(
                "/v1/models", headers={"authorization": f"Bearer {renewed}"}
            )
            return answer.status_code == 200

        await eventually(accepted)
        async with open_client(case.url, renewed) as again:
            batch = await ended(again, batch.id)
            assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 8)
            errors = await results(again, batch.error_file_id)
            assert {error["response"]["status_code"] for error in errors} == {401}


@pytest.mark.parametrize("counts", [True, False])
async def test_lines_count_for_quotas_only_if_the_key_says_so(
    store: Store, tmp_path: Path, keys: Path, counts: bool
) -> None:
    limits = QuotaLimits(concurrent=2, tokens_per_minute=10_000, batch_counts=counts)
    mine = add_key(keys, "a", True, None, limits)
    refusals = 'tideserve_gateway_quota_refusals_total{limit="concurrent",owner="a"}'
    async with (
        gateway_case(
            store, tmp_path / "model", sent_key=mine, api_keys_file=keys, batches=settings(tmp_path)
        ) as case,
        open_client(case.url, mine) as client,
    ):

        async def others_refused() -> bool:
            metrics = (await case.http.get("/metrics")).text.splitlines()
            (value,) = [line.split()[-1] for line in metrics if line.startswith(refusals)]
            return float(value) >= 4

        worker = case.paused(5)
        batch = await submit(client, as_file(chat_lines(6)))
        if counts:
            await eventually(others_refused)
        await eventually(lambda: len(worker.active) == (2 if counts else 6))
        worker.pause_at = None
        worker.go.set()
        batch = await ended(client, batch.id)
        assert batch.request_counts.completed == 6
        assert await results(client, batch.error_file_id) == []


async def test_a_claim_with_a_lost_reply_loses_no_line(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "RETRY_S", 0.01)
    claim, lost = LineStore.claim, 0

    async def losing(self: LineStore, token: int, batch_id: str, count: int) -> list[ClaimedLine]:
        nonlocal lost
        claimed = await claim(self, token, batch_id, min(count, 4))
        if claimed and lost < 3:
            lost += 1
            raise BatchStoreDown("the connection was lost")
        return claimed

    monkeypatch.setattr(LineStore, "claim", losing)
    batch = await ended(case.openai, (await submit(case.openai, as_file(chat_lines(20)))).id)
    assert lost == 3
    assert batch.request_counts.completed == 20
    assert len(case.cluster.workers[0].starts) == 20


async def test_without_a_store_the_routes_name_the_remedy(store: Store, tmp_path: Path) -> None:
    async with gateway_case(store, tmp_path / "model") as case:
        for method, path in (("GET", "files"), ("POST", "batches"), ("GET", "batches/batch_1")):
            answer = await case.http.request(method, f"/v1/{path}")
            assert answer.status_code == 501
            assert "batch_store" in answer.json()["error"]["message"]


async def test_a_drained_gateway_returns_its_lines_at_once(store: Store, tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    async with gateway_case(store, tmp_path / "model", batches=chosen) as case:
        worker = case.paused(5)
        batch = await submit(case.openai, as_file(chat_lines(20)))
        await eventually(lambda: len(worker.active) >= 16)

        async def first_tokens_read() -> bool:
            read = samples((await case.http.get("/metrics")).text)
            names = "vllm:time_to_first_token_seconds_count"
            return sum(count for (name, _), count in read.items() if name == names) >= 16

        await eventually(first_tokens_read)
    async with gateway_case(store, tmp_path / "model", batches=chosen) as case:
        scheduler = case.cluster.scheduler
        scheduler.wants_outcomes = True
        await check_answers(case.url, batch.id, chat_lines(20))
        # The lines' tokens are kept.
        resumed = {start.request_id for start in case.cluster.workers[0].starts if start.output_ids}
        assert len(resumed) >= 16
        # The scheduler would mistake their remaining tokens for the length of their output.
        await eventually(lambda: len(scheduler.outcomes) >= 2 * 20)
        assert not resumed & {outcome.request_id for outcome in scheduler.outcomes}
