"""Renders chat templates in a separate process, each rendering within limits of time and memory.

A template may loop or grow without end in code that cannot be interrupted. So this process forks a
renderer, which reads requests from the standard input. The kernel ends a renderer that exceeds a
limit; this process then responds for it and forks another. A renderer reads a request only after
its response to the last, so no other request is lost with it, and responses have the order of the
requests. This process ends with its parent, which closes its standard input.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from io import RawIOBase
from typing import Any, NamedTuple

from services.common.messages import encode_bytes, encode_message, limit_memory, read_message
from services.gateway.model.chat_template import ChatTemplate
from services.gateway.vocabulary.errors import BadRequest


class RenderLimits(NamedTuple):
    """Limits of a rendering; processor time does not depend on the load of the machine."""

    cpu_s: float
    wall_s: float


SHORT = RenderLimits(0.02, 2.0)
"""Most chats take less than a millisecond."""
LONG = RenderLimits(1.0, 8.0)
"""Of a chat that exceeded `SHORT`."""
MEMORY_MAX_BYTES = 2**28
"""Memory that a rendering may allocate; the largest body takes about a third of it."""
TEXT = b"\0"
"""First byte of a response with a prompt; others are JSON objects.

A warning in ASCII, which may be empty, this byte again, and the text of the prompt in UTF-8 follow.
"""


def _failure(reason: str) -> bytes:
    return json.dumps({"failed": reason}).encode()


TOO_LONG = _failure("takes too long")
"""Response to a request that exceeds a limit of time."""
_TOO_LARGE = _failure("takes too much memory")
_ENDED: Mapping[int, bytes] = {
    -signal.SIGPROF: TOO_LONG,
    -signal.SIGALRM: TOO_LONG,
    -signal.SIGABRT: _failure("takes too much memory, or crashes"),
    -signal.SIGSEGV: _failure("crashes"),
}
"""Responses by exit code of a renderer that exceeds a limit, or whose request crashes it."""


def main() -> None:
    """Read the template, then requests, until the input ends; send a response to each request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Unbuffered: a renderer must not read beyond its request.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as source:
        setup = read_message(source)
        if setup is None:
            return
        # A renderer that is ended must not spend time on a core dump.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_memory(MEMORY_MAX_BYTES)
        # All renderers inherit the compiled template.
        template, limits = ChatTemplate(**setup["template"]), RenderLimits(*setup["limits"])
        serve = partial(_serve, source, template, limits)
        while (response := _ENDED.get(code := _run_renderer(serve))) is not None:
            _send(encode_bytes(response))
    # As in a shell: the gateway logs by which signal a renderer ended.
    sys.exit(code if code >= 0 else 128 - code)


def _run_renderer(serve: Callable[[], None]) -> int:
    """Fork a renderer and wait for its end; return its exit code. The fork exits here."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)
    code = 1
    # The fork must exit after any exception, and never return into the caller's loop.
    try:
        serve()
        code = 0
    finally:
        os._exit(code)


def _serve(source: RawIOBase, template: ChatTemplate, limits: RenderLimits) -> None:
    while (request := read_message(source)) is not None:
        # This process ends if it exceeds a limit of time.
        signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        response = _response(template, **request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(response)


def _response(template: ChatTemplate, bytes_max: int, fields: Mapping[str, Any]) -> bytes:
    """Render `fields`, the arguments of `ChatTemplate.render`; return the encoded response."""
    warnings: list[str] = []
    try:
        # Tool calls may have lone surrogates, which the gateway refuses.
        text = template.render(**fields, warn=warnings.append).encode("utf-8", "surrogatepass")
        if len(text) > bytes_max:
            return encode_message({"bytes": len(text)})
        return encode_bytes(TEXT + "".join(warnings).encode() + TEXT + text)
    except BadRequest as error:
        return encode_message({"refused": error.message, "param": error.param})
    except MemoryError:
        return encode_bytes(_TOO_LARGE)


def _send(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
