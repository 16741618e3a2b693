"""Serves OpenAI's Batch API: /v1/batches."""

from fastapi import APIRouter, Depends, Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from services.gateway.api.batches import CreateBatchRequest, parse_create, window_s
from services.gateway.api.json_object import parse_object
from services.gateway.batches.errors import no_such_file
from services.gateway.batches.rows import BatchRow, NewBatch
from services.gateway.batches.service import BatchService
from services.gateway.batches.validation import BYTES_PER_TOKEN
from services.gateway.http.batch_api import (
    NotConfigured,
    batch_object,
    check_url,
    number_of,
    owner_of,
    page,
)
from services.gateway.http.description import describe_body
from services.gateway.http.files_routes import router as files_router
from services.gateway.http.response import idempotency_key_of, read_body
from services.gateway.records.request_record import record_of
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool

LISTED, LISTED_MAX = 20, 100
METHODS = ["GET", "POST", "DELETE"]


def routers(api: BatchService | None, serving: RequestServing, pool: TextPool) -> list[APIRouter]:
    """The routes of files and batches; without `api` they refuse all requests."""
    if api is None:
        return [_absent()]
    return [files_router(api, serving.client_stall_s), router(api, serving, pool)]


def router(api: BatchService, serving: RequestServing, pool: TextPool) -> APIRouter:
    """The routes of batches."""
    routes = APIRouter(prefix="/v1/batches", dependencies=[Depends(check_url)])

    def parse(data: bytearray) -> tuple[CreateBatchRequest, tuple[str, ...]]:
        return parse_create(parse_object(data), refuse_unknown=serving.refuse_unknown)

    @routes.post("", response_class=JSONResponse, openapi_extra=describe_body(CreateBatchRequest))
    async def create(request: Request) -> Response:
        """Create a batch from an uploaded file."""
        try:
            with serving.bodies.lease() as lease:
                body, warnings = await read_body(request, lease, pool, parse)
        except ClientDisconnect:
            record_of(request.scope).note_disconnect()
            return Response(status_code=499)
        record_of(request.scope).warnings += warnings
        return JSONResponse(batch_object(await _created(api, request, body)))

    @routes.get("", response_class=JSONResponse)
    async def list_batches(request: Request) -> Response:
        """List the batches of the key's owner, newest first."""
        query = request.query_params
        limit = number_of(query, "limit", LISTED, LISTED_MAX)
        rows, more = await api.store.page(owner_of(request), query.get("after"), limit)
        return page(rows, more, batch_object)

    @routes.get("/{batch_id}", response_class=JSONResponse)
    async def get_batch(request: Request, batch_id: str) -> Response:
        """Describe a batch."""
        return JSONResponse(batch_object(await api.store.get(owner_of(request), batch_id)))

    @routes.post("/{batch_id}/cancel", response_class=JSONResponse)
    async def cancel(request: Request, batch_id: str) -> Response:
        """Cancel a batch: lines that have not ended are cancelled."""
        return JSONResponse(batch_object(await api.store.cancel(owner_of(request), batch_id)))

    return routes


async def _created(api: BatchService, request: Request, body: CreateBatchRequest) -> BatchRow:
    """The batch of a request, which exists already if its Idempotency-Key was used before."""
    record = record_of(request.scope)
    principal = record.principal
    if "\0" in body.input_file_id:
        raise no_such_file(body.input_file_id)
    file = await api.store.files.get(principal.owner, body.input_file_id)
    expiry = body.output_expires_after
    new_batch = NewBatch(
        principal.owner,
        principal.key_id,
        body.endpoint,
        body.input_file_id,
        window_s(body.completion_window, api.settings.batch_expiry_max_s),
        body.metadata or {},
        _idempotency_key(request),
        # Until the validation has counted them.
        tokens=file.size_bytes // BYTES_PER_TOKEN,
        output_keep_s=None if expiry is None else expiry.seconds,
    )
    batch, new = await api.store.create(
        new_batch, principal.limits.batch_tokens_queued, api.settings.batch_open_max
    )
    record.replayed = not new
    return batch


def _idempotency_key(request: Request) -> str | None:
    key = idempotency_key_of(request.scope)
    return key[-1].decode() if isinstance(key, tuple) else None


def _absent() -> APIRouter:
    routes = APIRouter()

    async def refuse() -> Response:
        """Files and batches are not configured."""
        raise NotConfigured

    for path in ("/v1/files", "/v1/batches"):
        for suffix in ("", "/{rest:path}"):
            routes.add_api_route(path + suffix, refuse, methods=METHODS, include_in_schema=False)
    return routes
