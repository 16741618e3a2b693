"""Reads a request's body: bounded in size and time, and strictly JSON."""

import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from starlette.requests import Request

from services.common.timeouts import timeout
from services.gateway.body_budget import BodyLease
from services.gateway.errors import BodyTimeout, BodyTooLarge, InvalidRequest, UnsupportedMediaType
from services.gateway.tokenizer import TextPool

BODY_BYTES_MAX = 4 * 2**20
BODY_TIMEOUT_S = 30.0
# Parsing is that much faster than the tokenising that the pool's sizes are made for.
BYTES_PER_ITEM = 32

T = TypeVar("T")


async def read_body(
    request: Request, lease: BodyLease, pool: TextPool, parse: Callable[[dict[str, Any]], T]
) -> T:
    """What `parse` makes of the JSON object in the body, whose bytes `lease` then holds.

    Raises:
        GatewayError: whatever is wrong with the body.
        ClientDisconnect: if the client hung up before its end.
    """
    _check_headers(request)
    body = await _read(request, lease)
    return await pool.run(lambda: parse(parse_object(body)), len(body) // BYTES_PER_ITEM)


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `body`; a key given twice, NaN or Infinity is an error.

    Raises:
        InvalidRequest: if it is anything else than one object.
    """
    try:
        data = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8; encode it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}; "
            "correct it there"
        ) from None
    except ValueError:
        # Integers of thousands of digits; Python refuses to convert them.
        raise InvalidRequest("the body holds a number that is too long; shorten it") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply; flatten it") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be one JSON object; put the parameters into { }")
    return data


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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(f"the key {key[:64]!a} stands twice in one object", param=None)
            seen.add(key)
    return data


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is not JSON; send a finite number")
