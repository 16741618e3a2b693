"""Writes the output and error files of a batch, in the order of its input; deletes old objects."""

import json
from dataclasses import dataclass

from services.common import failpoint
from services.core.batches.vocabulary import LineState
from services.gateway.batches.object_files import ObjectFiles, ObjectWriter
from services.gateway.batches.rows import BatchRow, NewFile, OutputLine
from services.gateway.batches.store import BatchStore

OUTPUT_PURPOSE = "batch_output"
SWEEP_AGE_S = 3600.0
SWEEP_NAMES = 500

_DROPPED = {
    LineState.EXPIRED: (
        "batch_expired",
        "the completion window ended before this request was answered",
    ),
    LineState.CANCELLED: (
        "batch_cancelled",
        "the batch was cancelled before this request was answered",
    ),
}


async def conclude(
    store: BatchStore,
    files: ObjectFiles,
    token: int,
    batch: BatchRow,
    keep_s: float,
) -> bool:
    """Write the files of a `writable` batch, and end it; False if that was done before.

    The objects have names of this leadership, so that a suspended leader cannot replace those of
    the next; the rows of `BatchStore.conclude` are the commit. The files expire after `keep_s`, or
    after the batch's own time if that is shorter.

    Raises:
        BatchStoreDown: if the database or the storage fails; repeat it.
        Fenced: if another gateway leads.
    """
    if batch.output_keep_s is not None:
        keep_s = min(keep_s, batch.output_keep_s)
    folder = f"batches/{batch.batch_id}/{token}"
    output_name, errors_name = f"{folder}/output.jsonl", f"{folder}/errors.jsonl"
    async with files.writing(output_name) as output, files.writing(errors_name) as errors:
        await _write(store, batch, _Pair(output, errors))
    failpoint.hit("gateway.batches.output_written")
    named = [
        _new_file(batch, writer, name, kind, keep_s)
        for writer, name, kind in (
            (output, output_name, "output"),
            (errors, errors_name, "errors"),
        )
    ]
    return await store.conclude(token, batch.batch_id, *named)


async def sweep(store: BatchStore, files: ObjectFiles, token: int, keep_s: float) -> None:
    """Delete old batches, and objects that no file has; to be called by a new leader, and hourly.

    Such objects are those of deleted files, and of uploads and leaders that ended early.

    Raises:
        BatchStoreDown: if the database or the storage fails; repeat it.
        Fenced: if another gateway leads.
    """
    await store.forget(token, keep_s)
    # Younger objects may wait for their rows.
    names = await files.older_than(SWEEP_AGE_S)
    for first in range(0, len(names), SWEEP_NAMES):
        for name in await store.files.dead_objects(names[first : first + SWEEP_NAMES]):
            await files.delete(name)


@dataclass(frozen=True, slots=True)
class _Pair:
    output: ObjectWriter
    errors: ObjectWriter


async def _write(store: BatchStore, batch: BatchRow, pair: _Pair) -> None:
    after_line = 0
    while page := await store.lines.ended(batch.batch_id, after_line):
        answered = [line for line in page if line.state is LineState.DONE]
        others = [line for line in page if line.state is not LineState.DONE]
        for writer, ended in ((pair.output, answered), (pair.errors, others)):
            if ended:
                await writer.write(b"".join(_encoded(batch.batch_id, line) for line in ended))
        after_line = page[-1].line
        failpoint.hit("gateway.batches.output_begun")


def _encoded(batch_id: str, line: OutputLine) -> bytes:
    """A line of the files, in the form of the OpenAI API."""
    head = {"id": f"batch_req_{batch_id.removeprefix('batch_')}_{line.line}"}
    begin = json.dumps(head | {"custom_id": line.custom_id})[:-1].encode()
    if line.state in _DROPPED:
        code, message = _DROPPED[line.state]
        error = json.dumps({"code": code, "message": message}).encode()
        return begin + b', "response": null, "error": ' + error + b"}\n"
    # The body is JSON already; it is not parsed again.
    response = json.dumps({"status_code": line.status, "request_id": line.request_id})[:-1]
    body = b', "body": ' + line.body
    return begin + b', "response": ' + response.encode() + body + b'}, "error": null}\n'


def _new_file(
    batch: BatchRow, writer: ObjectWriter, name: str, kind: str, keep_s: float
) -> NewFile | None:
    """The row of an object; None if nothing was written."""
    if not writer.size_bytes:
        return None
    return NewFile(
        owner=batch.owner,
        purpose=OUTPUT_PURPOSE,
        name=f"{batch.batch_id}_{kind}.jsonl",
        size_bytes=writer.size_bytes,
        sha256=writer.sha256,
        object_name=name,
        keep_s=keep_s,
    )
