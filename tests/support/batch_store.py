"""Batches for tests of the store: files, batches in progress, and results of lines."""

from collections.abc import Sequence

from services.gateway.batches.line_store import ADD_MAX
from services.gateway.batches.rows import LineResult, NewBatch, NewFile, NewLine
from services.gateway.batches.store import BatchStore

OWNER, OTHER = "alice", "bob"


def new_file(owner: str = OWNER, name: str = "in.jsonl") -> NewFile:
    return NewFile(owner, "batch", name, 10, "0" * 64, f"uploads/{name}")


def new_lines(count: int, sort_keys: Sequence[int] = ()) -> list[NewLine]:
    keys = sort_keys or [0] * count
    return [NewLine(n, f"id-{n}", 10 * n, 9, keys[n - 1]) for n in range(1, count + 1)]


async def new_batch(store: BatchStore, owner: str = OWNER) -> str:
    """A batch in VALIDATING."""
    file = await store.files.add(new_file(owner))
    endpoint = "/v1/chat/completions"
    batch, _ = await store.create(NewBatch(owner, "k", endpoint, file.file_id, 3600))
    return batch.batch_id


async def begun_batch(
    store: BatchStore,
    token: int,
    count: int,
    sort_keys: Sequence[int] = (),
    owner: str = OWNER,
) -> str:
    """A batch in progress with `count` pending lines."""
    batch_id = await new_batch(store, owner)
    lines = new_lines(count, sort_keys)
    for first in range(0, count, ADD_MAX):
        await store.lines.add(token, batch_id, lines[first : first + ADD_MAX])
    assert await store.begin(token, batch_id, count, 100 * count)
    return batch_id


def result(batch_id: str, line: int, body: bytes = b"{}", *, error: bool = False) -> LineResult:
    status = 400 if error else 200
    return LineResult(batch_id, line, status, f"req-{line}", body, error, 5, 7, 2)
