"""A small OpenAI-compatible server that streams numbers, refuses or fails as configured."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeOpenAI(ThreadingHTTPServer):
    """Listens on a free port; `received` holds the bodies of all requests.

    `pages` are further paths and the JSON that a GET of them answers with.

    A prompt that begins with a key of `behaviour` is answered with that status, or `"cut"`: the
    stream ends early, `"error"`: with an error event, `"short"`: well, after one token;
    `"silent"`: not before the server ends. The ids of tokens, if asked for, count from 0.
    `retry_after`: that header of refusals.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behaviour: dict[int, int | str] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour = behaviour or {}
        self.received: list[dict[str, Any]] = []
        self.pages: dict[str, Any] = {}
        self.retry_after: str | None = None
        self.ending = threading.Event()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeOpenAI
    protocol_version = "HTTP/1.1"
    # Without this, each small write waits for the previous acknowledgement.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Serve models and `pages`; metrics are missing."""
        if self.path in self.server.pages:
            self._whole(200, json.dumps(self.server.pages[self.path]).encode())
        elif self.path == "/v1/models":
            self._whole(200, b'{"data": [{"id": "fake"}]}')
        else:
            self._whole(404, b"{}")

    def do_POST(self) -> None:
        """Serve a completion; batches are missing."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/files":
            self._whole(501, b'{"error": {"message": "no"}}')
            return
        body = json.loads(content)
        self.server.received.append(body)
        behaviour = self.server.behaviour.get(body["prompt"][0])
        if isinstance(behaviour, int):
            self._whole(behaviour, b'{"error": {"message": "no"}}')
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("X-Request-Id", f"cmpl-{len(self.server.received)}")
        self.end_headers()
        if behaviour == "silent":
            self.server.ending.wait()
        tokens = 1 if behaviour == "short" else body["max_tokens"]
        for event in _events(tokens, behaviour, body.get("return_token_ids", False)):
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def _whole(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 503 and self.server.retry_after is not None:
            self.send_header("Retry-After", self.server.retry_after)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the access log."""


def _events(tokens: int, ending: str | None, ids: bool) -> Iterator[str]:
    for index in range(tokens):
        reason = "length" if index == tokens - 1 else None
        choice: dict[str, Any] = {"index": 0, "text": f"{index} ", "finish_reason": reason}
        yield json.dumps({"choices": [choice | ({"token_ids": [index]} if ids else {})]})
        if ending == "cut":
            return
        if ending == "error":
            yield json.dumps({"error": {"message": "the worker is gone"}})
            return
    usage = {"prompt_tokens": 1, "completion_tokens": tokens}
    yield json.dumps({"choices": [], "usage": usage})
    yield "[DONE]"


@contextmanager
def fake_openai(behaviour: dict[int, int | str] | None = None) -> Iterator[FakeOpenAI]:
    """A running server."""
    server = FakeOpenAI(behaviour)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ending.set()
        server.shutdown()
        server.server_close()
        thread.join()
