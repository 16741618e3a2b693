"""Reads a request's body: bounded in size and time, and strictly JSON."""

from collections.abc import Callable
from typing import NoReturn, TypeVar

from starlette.requests import Request

from services.common.timeouts import timeout
from services.gateway.bounds.body_budget import BODY_BYTES_MAX, BODY_BYTES_PER_ITEM, BodyLease
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import BodyTimeout, BodyTooLarge, UnsupportedMediaType

BODY_TIMEOUT_S = 30.0

T = TypeVar("T")


async def read_body(
    request: Request, lease: BodyLease, pool: TextPool, parse: Callable[[bytearray], T]
) -> T:
    """What `parse` makes of the body, which is JSON and whose bytes `lease` then holds.

    Raises:
        GatewayError: whatever is wrong with the body.
        ClientDisconnect: if the client hung up before its end.
    """
    _check_headers(request)
    body = await _read(request, lease)
    return await pool.run(lambda: parse(body), len(body) // BODY_BYTES_PER_ITEM)


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(
            "the content type must be application/json; set the header Content-Type so"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("compressed bodies are not supported; send it as it is")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > BODY_BYTES_MAX:
        _too_large()


async def _read(request: Request, lease: BodyLease) -> bytearray:
    body = bytearray()
    try:
        async with timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                if len(body) + len(part) > BODY_BYTES_MAX:
                    _too_large()
                lease.take(len(part))
                body += part
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return body


def _too_large() -> NoReturn:
    raise BodyTooLarge(f"the body is larger than the limit of {BODY_BYTES_MAX} bytes; shorten it")
