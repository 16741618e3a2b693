"""Serves OpenAI's Files API: /v1/files."""

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.gateway.api.batches import KEEP_MAX_S, KEEP_MIN_S
from services.gateway.batches.errors import BatchStoreDown
from services.gateway.batches.object_files import ObjectFiles
from services.gateway.batches.rows import FileRow, NewFile
from services.gateway.batches.service import BatchService
from services.gateway.bounds.client import ClientGone, WatchedClient
from services.gateway.http.batch_api import check_url, file_object, number_of, owner_of, page
from services.gateway.http.dialect import guard_client
from services.gateway.http.multipart import UploadForm, form_of, read_form
from services.gateway.records.request_record import record_of
from services.gateway.vocabulary.errors import BadRequest, QueueFull

BATCH = "batch"
TRANSFERS_MAX = 16
"""Concurrent uploads and downloads; each holds a few megabytes."""
OWNER_TRANSFERS_MAX = TRANSFERS_MAX // 2
LISTED_MAX = 10_000
PIECE_BYTES = 2**18
NAME_CHARS_MAX = 256


def router(api: BatchService, stall_s: float) -> APIRouter:
    """The routes; a client that reads nothing for `stall_s` is disconnected."""
    routes = APIRouter(prefix="/v1/files", dependencies=[Depends(check_url)])
    transfers = _Transfers()

    @routes.post("", response_class=JSONResponse)
    async def upload(request: Request) -> Response:
        """Upload a file of requests: a form with `file` and `purpose` batch."""
        with transfers.entered(owner_of(request)):
            form = form_of(request, api.settings.batch_file_bytes_max)
            try:
                file = await _store(api, request, form)
            except ClientDisconnect:
                record_of(request.scope).note_disconnect()
                return Response(status_code=499)
        return JSONResponse(file_object(file))

    @routes.get("", response_class=JSONResponse)
    async def list_files(request: Request) -> Response:
        """List the files of the key's owner."""
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("'order' must be asc or desc; correct it", param="order")
        limit = number_of(query, "limit", LISTED_MAX, LISTED_MAX)
        rows, more = await api.store.files.page(
            *(owner_of(request), query.get("after"), limit, query.get("purpose")),
            ascending=order == "asc",
        )
        return page(rows, more, file_object)

    @routes.get("/{file_id}", response_class=JSONResponse)
    async def get_file(request: Request, file_id: str) -> Response:
        """Describe a file."""
        return JSONResponse(file_object(await api.store.files.get(owner_of(request), file_id)))

    @routes.get("/{file_id}/content", response_class=Response)
    async def content(request: Request, file_id: str) -> Response:
        """The content of a file."""
        file = await api.store.files.get(owner_of(request), file_id)
        return FileContent(api.files, file, stall_s, transfers)

    @routes.delete("/{file_id}", response_class=JSONResponse)
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file that no running batch reads."""
        await api.store.files.delete(owner_of(request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return routes


class _Transfers:
    """Bounds concurrent uploads and downloads."""

    def __init__(self) -> None:
        self._counts = Counter[str]()  # by owner

    @contextlib.contextmanager
    def entered(self, owner: str) -> Iterator[None]:
        """Count a transfer inside the `with` block. Raises QueueFull."""
        if self._counts.total() >= TRANSFERS_MAX or self._counts[owner] >= OWNER_TRANSFERS_MAX:
            raise QueueFull(
                f"the gateway already transfers {self._counts.total()} files,"
                f" {self._counts[owner]} of this key's owner; retry later",
                retry_after_s=5.0,
            )
        self._counts[owner] += 1
        try:
            yield
        finally:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]


async def _store(api: BatchService, request: Request, form: UploadForm) -> FileRow:
    """Write an uploaded file; it exists once its row is written."""
    name = f"uploads/{secrets.token_hex(16)}"
    async with api.files.writing(name) as writer:
        await read_form(request, form, writer.write)
        keep_s = _checked(form)
        if not writer.size_bytes:
            raise BadRequest("the file is empty; upload a file with requests", param="file")
    return await api.store.files.add(
        NewFile(
            owner_of(request),
            BATCH,
            form.filename or "file",
            writer.size_bytes,
            writer.sha256,
            name,
            keep_s,
        )
    )


def _checked(form: UploadForm) -> int | None:
    """Check the fields of an upload; returns the seconds until the file expires, if given."""
    if (purpose := form.fields.get("purpose")) != BATCH:
        raise BadRequest(
            f"'purpose' must be '{BATCH}', but is {(purpose or '')[:64]!a}; correct it",
            param="purpose",
        )
    if len(form.filename or "") > NAME_CHARS_MAX:
        raise BadRequest(
            f"the file name exceeds {NAME_CHARS_MAX} characters; shorten it", param="file"
        )
    seconds = form.fields.get("expires_after[seconds]")
    if seconds is None:
        return None
    anchor = form.fields.get("expires_after[anchor]")
    known = anchor == "created_at" and seconds.isascii() and seconds.isdigit()
    if not known or len(seconds) > 9 or not KEEP_MIN_S <= int(seconds) <= KEEP_MAX_S:
        raise BadRequest(
            f"'expires_after' must have the anchor created_at and {KEEP_MIN_S} to {KEEP_MAX_S}"
            " seconds; correct it",
            param="expires_after",
        )
    return int(seconds)


class FileContent(Response):
    """Streams the content of a file."""

    def __init__(
        self, files: ObjectFiles, file: FileRow, stall_s: float, transfers: _Transfers
    ) -> None:
        super().__init__()
        self._files = files
        self._file = file
        self._stall_s = stall_s
        self._transfers = transfers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content. Raises GatewayError before the response begins."""
        client = WatchedClient(send, self._stall_s)
        try:
            with self._transfers.entered(self._file.owner):
                # Read before the response begins, so that an error has its own response.
                piece = await self._read(0)
                async with guard_client(client, receive):
                    await self._send(client, piece)
        except ClientGone:
            record_of(scope).note_disconnect()

    async def _send(self, client: WatchedClient[Any], piece: bytes) -> None:
        file = self._file
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(file.size_bytes).encode()),
        ]
        await client.send({"type": "http.response.start", "status": 200, "headers": headers})
        offset = 0
        while True:
            offset += len(piece)
            more = offset < file.size_bytes
            await client.send({"type": "http.response.body", "body": piece, "more_body": more})
            if not more:
                return
            piece = await self._read(offset)

    async def _read(self, offset: int) -> bytes:
        length = min(PIECE_BYTES, self._file.size_bytes - offset)
        piece = await self._files.read(self._file.object_name, offset, length)
        if length and not piece:
            raise BatchStoreDown("the stored file is shorter than it was; upload it again")
        return piece
