"""Client of /v1/files and /v1/batches: runs requests as the lines of a batch."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Self

import httpx
import orjson

from services.common.timeouts import timeout
from tideserve.load.event_stream import completion_fields
from tideserve.load.workload import PlannedRequest

URL = "/v1/completions"
WINDOW = "24h"
POLL_S = 1.0
CALL_TIMEOUT_S = 60.0
CANCEL_TIMEOUT_S = 30.0
ENDED = frozenset({"completed", "failed", "cancelled", "expired"})


class BatchFailed(Exception):
    """The batch did not complete, for the reason in the message."""


class BatchClient:
    """Runs batches at the server `url`."""

    def __init__(self, url: str, api_key: str | None, model: str) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=CALL_TIMEOUT_S)
        self._model = model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def run(self, requests: Sequence[PlannedRequest]) -> None:
        """Run a batch of `requests` to its end; cancel it if this task is cancelled.

        Raises:
            BatchFailed: if the server refuses the batch, or a line has no answer.
        """
        form = {"data": {"purpose": "batch"}, "files": {"file": ("lines", self._lines(requests))}}
        file = await self._call("POST", "/v1/files", **form)
        fields = {"input_file_id": file["id"], "endpoint": URL, "completion_window": WINDOW}
        batch = await self._call("POST", "/v1/batches", json=fields)
        path = f"/v1/batches/{batch['id']}"
        try:
            batch = await self._ended(path)
        except asyncio.CancelledError:
            # What follows must not share the server with the rest of the batch.
            with contextlib.suppress(BatchFailed, TimeoutError):
                async with timeout(CANCEL_TIMEOUT_S):
                    await self._call("POST", f"{path}/cancel")
                    await self._ended(path)
            raise
        counts = batch["request_counts"]
        if counts["completed"] < len(requests):
            raise BatchFailed(
                f"the batch is {batch['status']}; {counts['completed']} of {len(requests)} lines"
                " have an answer"
            )

    def _lines(self, requests: Sequence[PlannedRequest]) -> bytes:
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": URL,
                "body": completion_fields(self._model, request),
            }
            for number, request in enumerate(requests)
        ]
        return b"".join(orjson.dumps(line) + b"\n" for line in lines)

    async def _ended(self, path: str) -> dict[str, Any]:
        while True:
            batch = await self._call("GET", path)
            if batch["status"] in ENDED:
                return batch
            await asyncio.sleep(POLL_S)

    async def _call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise BatchFailed(f"{method} {path}: {error or type(error).__name__}") from error
        if response.is_error:
            raise BatchFailed(
                f"{method} {path}: HTTP {response.status_code}: {response.text[:500]}"
            )
        body: dict[str, Any] = response.json()
        return body
