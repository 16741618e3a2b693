"""Files, batches and lines in the database; each test runs on SQLite and on PostgreSQL."""

import asyncio

import pytest
from sqlalchemy import update

from services.core.batches.vocabulary import BatchState, LineState
from services.gateway.batches.errors import EntryInUse, Fenced, NoSuchEntry
from services.gateway.batches.rows import (
    LineError,
    LineProgress,
    NewBatch,
    ReturnedLine,
)
from services.gateway.batches.schema import batches
from services.gateway.batches.store import BatchStore
from services.gateway.vocabulary.errors import IdempotencyKeyReused, OverQuota
from tests.support.batch_store import (
    OTHER,
    OWNER,
    begun_batch,
    new_batch,
    new_file,
    new_lines,
    result,
)

CHAT = "/v1/chat/completions"


async def test_files_are_listed_by_owner_in_pages(store: BatchStore) -> None:
    await store.lead(1)
    made = [await store.files.add(new_file(name=f"{n}")) for n in range(5)]
    await store.files.add(new_file(OTHER, "foreign"))
    first, more = await store.files.page(OWNER, limit=3)
    assert [file.file_id for file in first] == [file.file_id for file in made[:1:-1]] and more
    rest, more = await store.files.page(OWNER, after=first[-1].file_id, limit=3)
    assert [file.file_id for file in rest] == [file.file_id for file in made[1::-1]] and not more
    oldest, _ = await store.files.page(OWNER, ascending=True, limit=1)
    assert oldest == [made[0]]
    assert await store.files.page(OWNER, purpose="batch_output") == ([], False)


async def test_a_foreign_or_deleted_file_does_not_exist(store: BatchStore) -> None:
    file = await store.files.add(new_file())
    with pytest.raises(NoSuchEntry):
        await store.files.get(OTHER, file.file_id)
    with pytest.raises(NoSuchEntry):
        await store.files.delete(OTHER, file.file_id)
    await store.files.delete(OWNER, file.file_id)
    with pytest.raises(NoSuchEntry):
        await store.files.get(OWNER, file.file_id)
    assert await store.files.dead_objects([file.object_name, "x"]) == [file.object_name, "x"]


async def test_a_file_in_use_is_not_deleted(store: BatchStore) -> None:
    token = await store.lead(1)
    batch_id = await new_batch(store)
    file_id = (await store.get(OWNER, batch_id)).input_file
    with pytest.raises(EntryInUse):
        await store.files.delete(OWNER, file_id)
    await store.fail(token, batch_id, [LineError("empty_file", "the file is empty")])
    await store.files.delete(OWNER, file_id)


async def test_lines_run_in_the_order_of_their_keys(store: BatchStore) -> None:
    token = await store.lead(1)
    batch_id = await begun_batch(store, token, 5, [3, 1, 2, 1, -1])
    claimed = await store.lines.claim(token, batch_id, 3)
    assert [line.line for line in claimed] == [5, 2, 4]
    assert [line.line for line in await store.lines.claim(token, batch_id, 9)] == [3, 1]
    assert claimed[0].custom_id == "id-5" and claimed[0].offset == 50 and claimed[0].length == 9


async def test_a_batch_ends_with_its_lines(store: BatchStore) -> None:
    token = await store.lead(1)
    batch_id = await begun_batch(store, token, 3)
    await store.lines.claim(token, batch_id, 3)
    finished = [
        store.lines.finish(token, result(batch_id, n, b'{"n":%d}' % n, error=n == 2))
        for n in (3, 1, 2)
    ]
    assert await asyncio.gather(*finished) == [True, True, True]
    assert not await store.lines.finish(token, result(batch_id, 1, b"other"))
    (opened,) = await store.advance(token)
    batch = opened.batch
    assert opened.writable and not opened.stopping and batch.state is BatchState.FINALIZING
    assert (batch.completed, batch.failed, batch.open) == (2, 1, 0)
    assert (batch.prompt_tokens, batch.output_tokens, batch.cached_tokens) == (15, 21, 6)
    ended = await store.lines.ended(batch_id, 0)
    assert [(line.line, line.body) for line in ended] == [
        (1, b'{"n":1}'),
        (2, b'{"n":2}'),
        (3, b'{"n":3}'),
    ]
    assert [line.state for line in ended] == [LineState.DONE, LineState.FAILED, LineState.DONE]
    assert await store.conclude(token, batch_id, new_file(name="out"), None)
    assert not await store.conclude(token, batch_id, new_file(name="out"), None)
    done = await store.get(OWNER, batch_id)
    assert done.state is BatchState.COMPLETED and done.error_file is None
    assert done.output_file is not None
    assert (await store.files.get(OWNER, done.output_file)).name == "out"
    assert await store.advance(token) == [] and await store.lines.ended(batch_id, 0) == []


async def test_a_page_of_results_is_bounded_in_bytes(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.batches.line_store.PAGE_BYTES", 100)
    token = await store.lead(1)
    batch_id = await begun_batch(store, token, 4)
    await store.lines.claim(token, batch_id, 4)
    for number, size in enumerate([60, 60, 500, 0], start=1):
        await store.lines.finish(token, result(batch_id, number, b"x" * size))
    pages, after = [], 0
    while page := await store.lines.ended(batch_id, after):
        pages.append([line.line for line in page])
        after = page[-1].line
    assert pages == [[1], [2], [3], [4]]


async def test_only_the_lines_that_are_not_held_are_released(store: BatchStore) -> None:
    former = await store.lead(1)
    batch_id = await begun_batch(store, former, 6)
    token = await store.lead(2)
    held = {(batch_id, line.line) for line in await store.lines.claim(token, batch_id, 2)}
    await store.lines.claim(token, batch_id, 2)
    await store.lines.finish(token, result(batch_id, 4))
    await store.lines.release_others(token, held)
    claimed = [line.line for line in await store.lines.claim(token, batch_id, 9)]
    assert claimed == [3, 5, 6]
    with pytest.raises(Fenced):
        await store.lines.release_others(former, set())


async def test_a_returned_line_keeps_its_tokens_and_waits(store: BatchStore) -> None:
    token = await store.lead(1)
    batch_id = await begun_batch(store, token, 2)
    await store.lines.claim(token, batch_id, 2)
    await store.lines.progress(token, [LineProgress(batch_id, 1, (5, 70_000))])
    returned = [ReturnedLine(batch_id, 1, failure=True), ReturnedLine(batch_id, 2, delay_s=3600)]
    await store.lines.give_back(token, returned)
    (line,) = await store.lines.claim(token, batch_id, 2)
    assert (line.line, line.attempts, line.output_ids) == (1, 1, (5, 70_000))
    await store.lines.give_back(token, [ReturnedLine(batch_id, 1, output_ids=(5,))])
    (line,) = await store.lines.claim(token, batch_id, 2)
    assert (line.attempts, line.output_ids) == (1, (5,))


async def test_a_new_leader_continues_and_the_former_is_fenced(store: BatchStore) -> None:
    first = await store.lead(10)
    batch_id = await begun_batch(store, first, 4)
    await store.lines.claim(first, batch_id, 3)
    await store.lines.progress(first, [LineProgress(batch_id, 1, (1, 2, 3))])
    assert await store.lines.finish(first, result(batch_id, 3, b"3"))
    second = await store.lead(11)
    assert second > first
    for call in (
        store.lines.claim(first, batch_id, 1),
        store.lines.finish(first, result(batch_id, 1)),
        store.lines.progress(first, [LineProgress(batch_id, 2, (9,))]),
        store.lines.give_back(first, [ReturnedLine(batch_id, 1)]),
        store.advance(first),
        store.begin(first, batch_id, 4, 0),
        store.fail(first, batch_id, []),
        store.conclude(first, batch_id, None, None),
        store.lead(10),
    ):
        with pytest.raises(Fenced):
            await call
    claimed = await store.lines.claim(second, batch_id, 9)
    assert [(line.line, line.output_ids) for line in claimed] == [(1, (1, 2, 3)), (2, ()), (4, ())]


async def test_an_election_that_began_again_replaces_a_silent_leader(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await store.lead(1000)
    with pytest.raises(Fenced):
        await store.lead(3)
    monkeypatch.setattr("services.gateway.batches.leadership.SILENT_S", 0.0)
    assert await store.lead(3) > first
    with pytest.raises(Fenced):
        await store.advance(first)


async def test_a_cancelled_batch_drops_its_pending_lines(store: BatchStore) -> None:
    token = await store.lead(1)
    batch_id = await begun_batch(store, token, 3)
    await store.lines.claim(token, batch_id, 1)
    with pytest.raises(NoSuchEntry):
        await store.cancel(OTHER, batch_id)
    assert (await store.cancel(OWNER, batch_id)).state is BatchState.CANCELLING
    assert (await store.cancel(OWNER, batch_id)).state is BatchState.CANCELLING
    (opened,) = await store.advance(token)
    assert opened.stopping and not opened.writable and opened.batch.dropped == 2
    assert await store.lines.claim(token, batch_id, 1) == []
    await store.lines.give_back(token, [ReturnedLine(batch_id, 1)])
    (opened,) = await store.advance(token)
    assert opened.writable and opened.batch.dropped == 3
    assert {line.state for line in await store.lines.ended(batch_id, 0)} == {LineState.CANCELLED}
    assert await store.conclude(token, batch_id, None, new_file(name="errors"))
    assert (await store.cancel(OWNER, batch_id)).state is BatchState.CANCELLED


async def test_a_batch_past_its_window_keeps_completed_lines(store: BatchStore) -> None:
    token = await store.lead(1)
    batch_id = await begun_batch(store, token, 3)
    (line,) = await store.lines.claim(token, batch_id, 1)
    assert await store.lines.finish(token, result(batch_id, line.line))
    past = update(batches).where(batches.c.id == batch_id).values(expires_s=0.0)
    await store._database.write("expire", lambda connection: connection.execute(past))
    assert await store.lines.claim(token, batch_id, 1) == []
    (opened,) = await store.advance(token)
    assert opened.stopping and opened.writable
    assert await store.conclude(token, batch_id, new_file(name="o"), new_file(name="e"))
    batch = await store.get(OWNER, batch_id)
    assert batch.state is BatchState.EXPIRED and (batch.completed, batch.dropped) == (1, 2)
    with pytest.raises(EntryInUse):
        await store.cancel(OWNER, batch_id)


async def test_a_batch_past_its_window_is_validated_no_longer(store: BatchStore) -> None:
    token = await store.lead(1)
    batch_id, other = await new_batch(store), await new_batch(store)
    await store.lines.add(token, batch_id, new_lines(2))
    past = update(batches).where(batches.c.id == batch_id).values(expires_s=0.0)
    await store._database.write("expire", lambda connection: connection.execute(past))
    assert [opened.batch.batch_id for opened in await store.advance(token)] == [other]
    batch = await store.get(OWNER, batch_id)
    assert batch.state is BatchState.FAILED
    assert [error.code for error in batch.errors] == ["batch_expired"]
    assert not await store.lines.add(token, batch_id, new_lines(2))
    assert not await store.begin(token, batch_id, 4, 0)


async def test_a_batch_that_is_cancelled_while_validated_never_runs(store: BatchStore) -> None:
    token = await store.lead(1)
    batch_id = await new_batch(store)
    await store.lines.add(token, batch_id, new_lines(2))
    await store.cancel(OWNER, batch_id)
    assert not await store.begin(token, batch_id, 2, 0)
    (opened,) = await store.advance(token)
    assert opened.writable and await store.lines.ended(batch_id, 0) == []
    assert await store.conclude(token, batch_id, None, None)
    assert (await store.get(OWNER, batch_id)).state is BatchState.CANCELLED


async def test_a_repeated_creation_returns_the_first_batch(store: BatchStore) -> None:
    file = await store.files.add(new_file())
    batch = NewBatch(OWNER, "k", CHAT, file.file_id, 3600, {"a": "b"}, "key-1")
    created = await asyncio.gather(*(store.create(batch) for _ in range(5)))
    assert len({row.batch_id for row, _ in created}) == 1
    assert [new for _, new in created].count(True) == 1
    with pytest.raises(IdempotencyKeyReused):
        await store.create(NewBatch(OWNER, "k", CHAT, file.file_id, 7200, {"a": "b"}, "key-1"))
    other = await store.files.add(new_file(OTHER))
    row, new = await store.create(NewBatch(OTHER, "k", CHAT, other.file_id, 1, {}, "key-1"))
    assert new and row.owner == OTHER
    with pytest.raises(NoSuchEntry):
        await store.create(NewBatch(OTHER, "k", CHAT, file.file_id, 3600))


async def test_batches_are_listed_newest_first_in_pages(store: BatchStore) -> None:
    ids = [await new_batch(store) for _ in range(4)]
    await new_batch(store, OTHER)
    first, more = await store.page(OWNER, limit=3)
    assert [batch.batch_id for batch in first] == ids[:0:-1] and more
    rest, more = await store.page(OWNER, after=first[-1].batch_id, limit=3)
    assert [batch.batch_id for batch in rest] == ids[:1] and not more
    assert len(await store.open()) == 5


async def test_the_tokens_of_an_owners_batches_are_limited(store: BatchStore) -> None:
    token = await store.lead(1)
    file = await store.files.add(new_file())
    batch = NewBatch(OWNER, "k", CHAT, file.file_id, 3600, tokens=60)
    row, _ = await store.create(batch, tokens_max=100)
    with pytest.raises(OverQuota):
        await store.create(batch, tokens_max=100)
    await store.fail(token, row.batch_id, [LineError("x", "y", 3, "body")])
    assert (await store.get(OWNER, row.batch_id)).errors == (LineError("x", "y", 3, "body"),)
    await store.create(batch, tokens_max=100)


async def test_the_open_batches_of_an_owner_are_limited(store: BatchStore) -> None:
    token = await store.lead(1)
    file = await store.files.add(new_file())
    batch = NewBatch(OWNER, "k", CHAT, file.file_id, 3600)
    rows = [(await store.create(batch, open_max=2))[0] for _ in range(2)]
    with pytest.raises(OverQuota, match="2 batches"):
        await store.create(batch, open_max=2)
    other = await store.files.add(new_file(OTHER))
    await store.create(NewBatch(OTHER, "k", CHAT, other.file_id, 3600), open_max=2)
    await store.fail(token, rows[0].batch_id, [])
    await store.create(batch, open_max=2)


async def test_validation_that_was_interrupted_begins_again(store: BatchStore) -> None:
    first = await store.lead(1)
    batch_id = await new_batch(store)
    await store.lines.add(first, batch_id, new_lines(3))
    second = await store.lead(2)
    await store.lines.clear(second, batch_id)
    await store.lines.add(second, batch_id, new_lines(2))
    assert await store.begin(second, batch_id, 2, 0)
    assert len(await store.lines.claim(second, batch_id, 9)) == 2


async def test_lines_are_stored_only_while_their_batch_is_validated(store: BatchStore) -> None:
    token = await store.lead(1)
    cancelled = await new_batch(store)
    await store.cancel(OWNER, cancelled)
    assert not await store.lines.add(token, cancelled, new_lines(3))
    begun = await begun_batch(store, token, 3)
    assert not await store.lines.clear(token, begun)
    assert len(await store.lines.claim(token, begun, 9)) == 3


async def test_the_tokens_of_all_batches_count_once_they_are_validated(store: BatchStore) -> None:
    token = await store.lead(1)
    first, second = await new_batch(store), await new_batch(store)
    for batch_id in (first, second):
        assert await store.lines.add(token, batch_id, new_lines(1))
    assert await store.begin(token, first, 1, 600, 1000)
    with pytest.raises(OverQuota):
        await store.begin(token, second, 1, 600, 1000)
    assert (await store.get(OWNER, second)).state is BatchState.VALIDATING
    assert await store.begin(token, second, 1, 300, 1000)
