"""Conversion between rows of the tables and their dataclasses."""

import json
import secrets
from dataclasses import asdict
from typing import Any

from sqlalchemy import Row

from services.core.batches.vocabulary import BatchState
from services.gateway.batches.rows import BatchRow, FileRow, LineError, NewBatch, NewFile
from services.gateway.batches.schema import ENTERED, database_now

_ID_BYTES = 12


def file_values(file: NewFile) -> dict[str, Any]:
    """The columns of a new file."""
    return {
        "id": f"file-{secrets.token_hex(_ID_BYTES)}",
        "owner": file.owner,
        "purpose": file.purpose,
        # PostgreSQL refuses NUL, and both databases lone surrogates.
        "name": file.name.replace("\0", "").encode(errors="replace").decode(),
        "bytes": file.size_bytes,
        "sha256": file.sha256,
        "object_name": file.object_name,
        "created_s": database_now(),
        "expires_s": None if file.keep_s is None else database_now() + file.keep_s,
    }


def file_row(row: Row[Any]) -> FileRow:
    """The file of a row of all columns."""
    return FileRow(
        file_id=row.id,
        owner=row.owner,
        purpose=row.purpose,
        name=row.name,
        size_bytes=row.bytes,
        sha256=row.sha256,
        object_name=row.object_name,
        created_s=row.created_s,
        expires_s=row.expires_s,
    )


def batch_values(batch: NewBatch) -> dict[str, Any]:
    """The columns of a new batch."""
    zero = ("total", "completed", "failed", "dropped", "cleared")
    tokens = ("prompt_tokens", "output_tokens", "cached_tokens")
    return {
        "id": f"batch_{secrets.token_hex(_ID_BYTES)}",
        "owner": batch.owner,
        "key_id": batch.key_id,
        "endpoint": batch.endpoint,
        "input_file": batch.input_file,
        "window_s": batch.window_s,
        "created_s": database_now(),
        "expires_s": database_now() + batch.window_s,
        "state": BatchState.VALIDATING,
        "metadata": json.dumps(dict(batch.metadata)),
        "errors": "[]",
        "tokens": batch.tokens,
        "idempotency_key": batch.idempotency_key,
        "output_keep_s": batch.output_keep_s,
        **dict.fromkeys(zero + tokens, 0),
    }


def batch_row(row: Row[Any]) -> BatchRow:
    """The batch of a row of all columns."""
    times = {state: getattr(row, column) for state, column in ENTERED.items()}
    return BatchRow(
        batch_id=row.id,
        owner=row.owner,
        key_id=row.key_id,
        endpoint=row.endpoint,
        input_file=row.input_file,
        window_s=row.window_s,
        state=BatchState(row.state),
        created_s=row.created_s,
        expires_s=row.expires_s,
        metadata=json.loads(row.metadata),
        errors=tuple(LineError(**error) for error in json.loads(row.errors)),
        total=row.total,
        completed=row.completed,
        failed=row.failed,
        dropped=row.dropped,
        tokens=row.tokens,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        cached_tokens=row.cached_tokens,
        entered_s={state: at_s for state, at_s in times.items() if at_s is not None},
        output_file=row.output_file,
        error_file=row.error_file,
        output_keep_s=row.output_keep_s,
    )


def errors_text(errors: tuple[LineError, ...]) -> str:
    """Errors as a column."""
    return json.dumps([asdict(error) for error in errors])
