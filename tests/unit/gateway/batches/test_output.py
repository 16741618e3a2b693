"""A batch goes from its input to its files, which have each line once and in order."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.core.batches.vocabulary import BatchState
from services.gateway.batches.errors import Fenced, NoSuchEntry
from services.gateway.batches.object_files import ObjectFiles
from services.gateway.batches.output import conclude, sweep
from services.gateway.batches.rows import NewBatch, NewFile, ReturnedLine
from services.gateway.batches.store import BatchStore
from services.gateway.batches.validation import BatchRules, validate
from tests.support.batch_store import OWNER, result

CHAT = "/v1/chat/completions"
KEEP_S = 3600.0
RULES = BatchRules(CHAT, 50_000, lambda model: None)


async def uploaded(
    store: BatchStore,
    files: ObjectFiles,
    count: int,
    tail: bytes = b"",
    output_keep_s: int | None = None,
) -> str:
    """A batch whose input has `count` valid lines and `tail`."""
    async with files.writing("uploads/x") as writer:
        for n in range(1, count + 1):
            request = {"model": "m", "messages": [{"role": "user", "content": f"{n}"}]}
            data = {"custom_id": f"id-{n}", "method": "POST", "url": CHAT, "body": request}
            await writer.write(json.dumps(data).encode() + b"\n")
        if tail:
            await writer.write(tail)
    file = await store.files.add(
        NewFile(OWNER, "batch", "x", writer.size_bytes, writer.sha256, "uploads/x")
    )
    new = NewBatch(OWNER, "k", CHAT, file.file_id, 3600, output_keep_s=output_keep_s)
    batch, _ = await store.create(new)
    return batch.batch_id


async def finished_line(store: BatchStore, files: ObjectFiles, token: int, batch_id: str) -> None:
    """Validate a batch of a line, and answer the line."""
    await validate(store, files, token, await store.get(OWNER, batch_id), RULES)
    await store.lines.claim(token, batch_id, 1)
    await store.lines.finish(token, result(batch_id, 1))


async def lines_of(store: BatchStore, files: ObjectFiles, file_id: str | None) -> list[dict]:
    assert file_id is not None
    file = await store.files.get(OWNER, file_id)
    content = await files.read(file.object_name, 0, file.size_bytes)
    assert len(content) == file.size_bytes
    return [json.loads(line) for line in content.splitlines()]


async def test_each_line_is_in_one_file_in_order(store: BatchStore, tmp_path: Path) -> None:
    files = ObjectFiles(str(tmp_path / "objects"))
    token = await store.lead(1)
    batch_id = await uploaded(store, files, 700)
    await validate(store, files, token, await store.get(OWNER, batch_id), RULES)
    while claimed := await store.lines.claim(token, batch_id, 200):
        last = claimed.pop()
        finished = [
            result(batch_id, line.line, b'{"n": %d}' % line.line, error=line.line % 7 == 0)
            for line in reversed(claimed)
        ]
        await asyncio.gather(*(store.lines.finish(token, end) for end in finished))
        if claimed:
            await store.lines.give_back(token, [ReturnedLine(batch_id, last.line)])
        else:
            await store.lines.finish(token, result(batch_id, last.line, b"{}", error=True))
    (opened,) = await store.advance(token)
    assert await conclude(store, files, token, opened.batch, KEEP_S)
    assert not await conclude(store, files, token, opened.batch, KEEP_S)
    batch = await store.get(OWNER, batch_id)
    assert batch.state is BatchState.COMPLETED
    output = await lines_of(store, files, batch.output_file)
    errors = await lines_of(store, files, batch.error_file)
    numbers = [int(line["custom_id"].removeprefix("id-")) for line in output]
    failed_numbers = [int(line["custom_id"].removeprefix("id-")) for line in errors]
    assert numbers == sorted(numbers) and failed_numbers == sorted(failed_numbers)
    assert sorted(numbers + failed_numbers) == list(range(1, 701))
    assert output[0]["response"] == {
        "status_code": 200,
        "request_id": f"req-{numbers[0]}",
        "body": {"n": numbers[0]},
    }
    assert output[0]["error"] is None and errors[0]["response"]["status_code"] == 400
    files.close()


async def test_an_invalid_input_fails_before_any_line_runs(
    store: BatchStore, tmp_path: Path
) -> None:
    files = ObjectFiles(str(tmp_path / "objects"))
    token = await store.lead(1)
    batch_id = await uploaded(store, files, 600, b"{}\n")
    await validate(store, files, token, await store.get(OWNER, batch_id), RULES)
    batch = await store.get(OWNER, batch_id)
    assert batch.state is BatchState.FAILED and batch.total == 0
    assert [error.line for error in batch.errors] == [601]
    assert await store.lines.claim(token, batch_id, 1) == []
    files.close()


async def test_a_batch_beyond_the_limit_of_tokens_fails(store: BatchStore, tmp_path: Path) -> None:
    files = ObjectFiles(str(tmp_path / "objects"))
    token = await store.lead(1)
    batch_id = await uploaded(store, files, 2)
    rules = replace(RULES, tokens_max=10)
    await validate(store, files, token, await store.get(OWNER, batch_id), rules)
    batch = await store.get(OWNER, batch_id)
    assert batch.state is BatchState.FAILED
    assert [error.code for error in batch.errors] == ["token_limit_exceeded"]
    files.close()


async def test_a_batch_fails_if_its_validation_does(store: BatchStore, tmp_path: Path) -> None:
    def check_model(model: str) -> None:
        raise RuntimeError("unexpected")

    files = ObjectFiles(str(tmp_path / "objects"))
    token = await store.lead(1)
    batch_id = await uploaded(store, files, 2)
    rules = replace(RULES, check_model=check_model)
    await validate(store, files, token, await store.get(OWNER, batch_id), rules)
    batch = await store.get(OWNER, batch_id)
    assert batch.state is BatchState.FAILED
    assert [(error.code, error.line) for error in batch.errors] == [("internal_error", 1)]
    files.close()


async def test_a_stale_validation_has_no_effect(store: BatchStore, tmp_path: Path) -> None:
    files = ObjectFiles(str(tmp_path / "objects"))
    token = await store.lead(1)
    stale = await store.get(OWNER, await uploaded(store, files, 3))
    await validate(store, files, token, stale, RULES)
    claimed = await store.lines.claim(token, stale.batch_id, 1)
    await validate(store, files, token, stale, RULES)
    assert await store.lines.finish(token, result(stale.batch_id, claimed[0].line))
    assert len(await store.lines.claim(token, stale.batch_id, 9)) == 2
    files.close()


async def test_a_cancelled_batch_lists_the_lines_that_never_ran(
    store: BatchStore, tmp_path: Path
) -> None:
    files = ObjectFiles(str(tmp_path / "objects"))
    token = await store.lead(1)
    batch_id = await uploaded(store, files, 3)
    await validate(store, files, token, await store.get(OWNER, batch_id), RULES)
    (line,) = await store.lines.claim(token, batch_id, 1)
    await store.lines.finish(token, result(batch_id, line.line))
    await store.cancel(OWNER, batch_id)
    (opened,) = await store.advance(token)
    assert await conclude(store, files, token, opened.batch, KEEP_S)
    batch = await store.get(OWNER, batch_id)
    (answered,) = await lines_of(store, files, batch.output_file)
    dropped = await lines_of(store, files, batch.error_file)
    assert answered["custom_id"] == f"id-{line.line}"
    assert [entry["error"]["code"] for entry in dropped] == ["batch_cancelled"] * 2
    assert all(entry["response"] is None for entry in dropped)
    files.close()


async def test_a_former_leader_does_not_delete_files_of_its_successor(
    store: BatchStore, tmp_path: Path
) -> None:
    files = ObjectFiles(str(tmp_path / "objects"))
    first = await store.lead(1)
    batch_id = await uploaded(store, files, 1)
    await finished_line(store, files, first, batch_id)
    (opened,) = await store.advance(first)
    second = await store.lead(2)
    with pytest.raises(Fenced):
        await conclude(store, files, first, opened.batch, KEEP_S)
    assert await conclude(store, files, second, opened.batch, KEEP_S)
    batch = await store.get(OWNER, batch_id)
    assert len(await lines_of(store, files, batch.output_file)) == 1
    written = await files.older_than(0)
    dead = await store.files.dead_objects(written)
    assert dead == [f"batches/{batch_id}/{first}/output.jsonl"]
    files.close()


@pytest.mark.parametrize(("own_s", "expected_s"), [(None, 3600), (60, 60), (7200, 3600)])
async def test_the_files_expire_after_the_shorter_time(
    store: BatchStore, tmp_path: Path, own_s: int | None, expected_s: int
) -> None:
    files = ObjectFiles(str(tmp_path / "objects"))
    token = await store.lead(1)
    batch_id = await uploaded(store, files, 1, output_keep_s=own_s)
    await finished_line(store, files, token, batch_id)
    (opened,) = await store.advance(token)
    assert await conclude(store, files, token, opened.batch, KEEP_S)
    output_file = (await store.get(OWNER, batch_id)).output_file
    assert output_file is not None
    output = await store.files.get(OWNER, output_file)
    assert output.expires_s is not None
    assert output.expires_s - output.created_s == pytest.approx(expected_s, abs=1)
    files.close()


async def test_an_expired_output_is_deleted_and_its_batch_stays(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.output.SWEEP_AGE_S", 0.0)
    files = ObjectFiles(str(tmp_path / "objects"))
    token = await store.lead(1)
    batch_id = await uploaded(store, files, 1, output_keep_s=-1)
    await finished_line(store, files, token, batch_id)
    (opened,) = await store.advance(token)
    assert await conclude(store, files, token, opened.batch, KEEP_S)
    batch = await store.get(OWNER, batch_id)
    assert batch.state is BatchState.COMPLETED and batch.output_file is not None
    with pytest.raises(NoSuchEntry):
        await store.files.get(OWNER, batch.output_file)
    await sweep(store, files, token, KEEP_S)
    assert await files.older_than(0) == ["uploads/x"]
    assert await store.get(OWNER, batch_id) == batch
    files.close()


async def test_old_batches_and_objects_without_a_file_are_deleted(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.output.SWEEP_AGE_S", 0.0)
    files = ObjectFiles(str(tmp_path / "objects"))
    token = await store.lead(1)
    batch_id = await uploaded(store, files, 1)
    async with files.writing("uploads/without-row") as writer:
        await writer.write(b"x")
    await validate(store, files, token, await store.get(OWNER, batch_id), RULES)
    await sweep(store, files, token, keep_s=0.0)
    assert await files.older_than(0) == ["uploads/x"]
    await store.cancel(OWNER, batch_id)
    (opened,) = await store.advance(token)
    assert await conclude(store, files, token, opened.batch, keep_s=-1.0)
    assert await store.advance(token) == []
    await store.files.delete(OWNER, opened.batch.input_file)
    await sweep(store, files, token, keep_s=3600.0)
    assert (await store.get(OWNER, batch_id)).state is BatchState.CANCELLED
    assert await files.older_than(0) == []
    await sweep(store, files, token, keep_s=-1.0)
    with pytest.raises(NoSuchEntry):
        await store.get(OWNER, batch_id)
    assert list((tmp_path / "objects").iterdir()) == []
    files.close()
