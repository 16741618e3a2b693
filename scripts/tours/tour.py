"""What every tour uses: calls that are recorded one by one, and plain HTTP to compare with.

Standard library only. A tour prints one JSON object per call:
{client, call, kind, ok, seconds, detail}; `ok` null is a call that the client cannot make, and the
detail of a call of the kind `limit` names the page that says why it is refused.
"""

import asyncio
import inspect
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from tours.plain import Plain
from tours.task import LONG_TOKENS, TOOL_NAME, TOOL_SCHEMA

Kind = Literal["about", "unary", "stream", "cancel", "error", "schema", "tool", "load", "limit"]
"""Kinds of calls; the server refuses a limit by decision, and a page of docs/ says so."""
KINDS: tuple[Kind, ...] = get_args(Kind)
REQUIRED_KINDS: tuple[Kind, ...] = ("unary", "stream", "cancel", "error", "schema", "tool")
"""Each tour has a call of each of these, or says why the client cannot make one."""

CALL_TIMEOUT_S = 120.0
UNFINISHED = 3
"""Exit status of a tour whose time was over before its last call."""
DETAIL_CHARS = 600

Call = Callable[[], str | Coroutine[Any, Any, str | None] | None]


class Failure(Exception):
    """The answer is not what it should be."""


class Tour:
    """One client's calls, made and recorded in the order in which they are written."""

    def __init__(self, client: str | None = None) -> None:
        """Reads where the server is from the environment, as scripts/client_tours.py sets it."""
        self.client = client or os.environ["TOUR_CLIENT"]
        self.url = os.environ["TOUR_URL"]
        self.grpc = os.environ.get("TOUR_GRPC", "")
        self.api_key = os.environ.get("TOUR_API_KEY") or "none"
        self._done = {tuple(one) for one in json.loads(os.environ.get("TOUR_DONE", "[]"))}
        self._end_s = time.monotonic() + float(os.environ.get("TOUR_SECONDS", "inf"))
        self.plain = Plain(self.url, self.api_key)
        self.model = self.plain.model

    def call(self, kind: Kind, name: str) -> Callable[[Call], None]:
        """Make the decorated call now and record it; it may return a detail worth telling.

        One that was made before is left out, and when the time is over the tour ends.
        """

        def make(function: Call) -> None:
            started_s = time.monotonic()
            if (kind, name) in self._done:
                return
            if started_s > self._end_s:
                raise SystemExit(UNFINISHED)
            try:
                detail = _run(function)
                ok = True
            except Exception as error:  # noqa: BLE001 - whatever a client raises is its failure
                detail = f"{type(error).__name__}: {error}"
                ok = False
            self._record(name, kind, ok, time.monotonic() - started_s, detail or "")

        return make

    def limit(self, name: str, page: str) -> Callable[[Call], None]:
        """Make the decorated call now, which expects the refusal that `page` of docs/ tells."""

        def make(function: Call) -> None:
            def expected() -> str | Coroutine[Any, Any, str | None]:
                result = function()
                return _then(result, page) if inspect.iscoroutine(result) else page

            self.call("limit", name)(expected)

        return make

    def cannot(self, kind: Kind, reason: str) -> None:
        """Record that the client has no such call."""
        if (kind, name := f"no {kind}") not in self._done:
            self._record(name, kind, None, 0.0, reason)

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """What is called inside asks for LONG_TOKENS and is given up: the server must stop, too.

        Raises Failure if all the tokens were made nonetheless.
        """
        before = self.plain.output_tokens()
        yield
        self.plain.wait_until_quiet()
        made = self.plain.output_tokens() - before
        check(made < LONG_TOKENS, f"all {made} tokens were made after the call was given up")

    async def cancelled(self, call: Coroutine[Any, Any, object]) -> None:
        """Cancel the task of a call for LONG_TOKENS after a second: the server must stop, too."""
        with self.given_up():
            running = asyncio.create_task(call)
            await asyncio.sleep(1)
            running.cancel()
            await asyncio.wait([running])
            check(running.cancelled(), "it was over")

    def _record(self, name: str, kind: str, ok: bool | None, seconds: float, detail: str) -> None:
        line = {
            "client": self.client,
            "call": name,
            "kind": kind,
            "ok": ok,
            "seconds": round(seconds, 3),
            "detail": detail[:DETAIL_CHARS],
        }
        print(json.dumps(line), flush=True)


async def _then(call: Coroutine[Any, Any, Any], answer: str) -> str:
    await call
    return answer


def _run(function: Call) -> str | None:
    result = function()
    if not inspect.iscoroutine(result):
        return result if isinstance(result, str) else None

    async def bounded() -> Any:
        return await asyncio.wait_for(result, CALL_TIMEOUT_S)

    detail = asyncio.run(bounded())
    return detail if isinstance(detail, str) else None


def check(holds: object, otherwise: str) -> None:
    """Raise Failure unless `holds`."""
    if not holds:
        raise Failure(otherwise)


def equal(got: object, wanted: object, what: str = "text") -> None:
    """Raise Failure unless both are equal."""
    check(got == wanted, f"{what}: got {got!r}, wanted {wanted!r}")


def refused(call: Callable[[], object], kind: type[BaseException]) -> Any:
    """The exception of `kind` that the call raises; Failure if it raises none."""
    try:
        answer = call()
    except kind as error:
        return error
    raise Failure(f"no {kind.__name__}, but {str(answer)[:200]}")


async def refused_later(call: Coroutine[Any, Any, object], kind: type[BaseException]) -> Any:
    """As `refused`, of a coroutine."""
    try:
        answer = await call
    except kind as error:
        return error
    raise Failure(f"no {kind.__name__}, but {str(answer)[:200]}")


def check_tool(name: object, arguments: Any) -> None:
    """Raise Failure unless tours.task's tool was called as its schema says; JSON is parsed."""
    equal(name, TOOL_NAME, "tool")
    validate(json.loads(arguments) if isinstance(arguments, str) else arguments, TOOL_SCHEMA)


def validate(value: Any, schema: Mapping[str, Any]) -> None:
    """Raise Failure unless `value` is an object of the schemas in tours.task: enums and numbers."""
    check(isinstance(value, dict), f"no object: {value!r}")
    equal(sorted(value), sorted(schema["required"]), "keys")
    for name, rule in schema["properties"].items():
        _validate_one(name, value[name], rule)


def _validate_one(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    if "enum" in rule:
        check(value in rule["enum"], f"{name}: {value!r} is none of {rule['enum']}")
    else:
        equal(rule["type"], "integer", f"type of {name}")
        check(type(value) is int, f"{name}: {value!r} is no integer")
        check(rule["minimum"] <= value <= rule["maximum"], f"{name}: {value} is out of range")


def joined(pieces: Sequence[str | None]) -> str:
    """The text of streamed pieces."""
    return "".join(piece or "" for piece in pieces)
