"""JSON objects, pages and errors of the routes of files and batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse

from services.common.clock import unix_s
from services.core.batches.vocabulary import BatchState
from services.gateway.batches.rows import BatchRow, FileRow
from services.gateway.records.request_record import record_of
from services.gateway.vocabulary.errors import BadRequest, GatewayError

T = TypeVar("T")


class NotConfigured(GatewayError):
    """This gateway has no store of batches."""

    status = 501
    code = "not_configured"

    def __init__(self) -> None:
        super().__init__(
            "this gateway serves no files and batches; set its 'batch_store', such as"
            " sqlite:////FOLDER/batches.db"
        )


def owner_of(request: Request) -> str:
    """The owner of the request's key; each owner has its own files and batches."""
    return record_of(request.scope).principal.owner


def check_url(request: Request) -> None:
    """Refuse characters that a database cannot store. Raises BadRequest."""
    if any("\0" in text for text in (request.url.path, *request.query_params.values())):
        raise BadRequest("the URL has a NUL character; remove it")


def number_of(query: Mapping[str, str], name: str, default: int, maximum: int) -> int:
    """The number `name` of a query, from 1 to `maximum`. Raises BadRequest."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= maximum):
        raise BadRequest(f"'{name}' must be a number from 1 to {maximum}; correct it", param=name)
    return int(text)


def page(
    rows: Sequence[T], has_more: bool, describe: Callable[[T], dict[str, Any]]
) -> JSONResponse:
    """A page of a list."""
    data = [describe(row) for row in rows]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return JSONResponse({"object": "list", "data": data, "has_more": has_more} | ends)


def file_object(file: FileRow) -> dict[str, Any]:
    """The file object of the OpenAI API."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_s),
        "expires_at": _whole(file.expires_s),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: BatchRow) -> dict[str, Any]:
    """The batch object of the OpenAI API, and `progress`."""
    entered = {
        f"{state.value}_at": _whole(batch.entered_s.get(state))
        for state in BatchState
        if state is not BatchState.VALIDATING
    }
    errors = [
        {"code": error.code, "message": error.message, "param": error.param, "line": error.line}
        for error in batch.errors
    ]
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        "completion_window": _window(batch.window_s),
        "status": batch.state.value,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": int(batch.created_s),
        "expires_at": int(batch.expires_s),
        **entered,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed + batch.dropped,
        },
        "metadata": dict(batch.metadata) or None,
        "usage": {
            "input_tokens": batch.prompt_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.prompt_tokens + batch.output_tokens,
        },
        "progress": progress_of(batch, unix_s()),
    }


def progress_of(batch: BatchRow, now_s: float) -> dict[str, Any] | None:
    """Tokens per second since the lines began, and the seconds left; None while none runs."""
    began_s = batch.entered_s.get(BatchState.IN_PROGRESS)
    ended = batch.completed + batch.failed
    if batch.state is not BatchState.IN_PROGRESS or began_s is None or not ended:
        return None
    elapsed_s = max(now_s - began_s, 1.0)
    tokens = batch.prompt_tokens + batch.output_tokens
    return {
        "tokens_per_s": round(tokens / elapsed_s, 1),
        "left_s": round(elapsed_s * batch.open / ended),
    }


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def _window(seconds: int) -> str:
    hours = seconds // 3600
    return f"{hours // 24}d" if hours % 24 == 0 and hours > 24 else f"{hours}h"
