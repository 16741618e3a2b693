"""Errors for a missing and for an unknown API key."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from tideserve.cli.client import AdminClient, HttpClient
from tideserve.cli.errors import CommandError


class Handler(http.server.BaseHTTPRequestHandler):
    """Refuses every request."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        (HttpClient, None, "needs an API key; none was sent: set TIDESERVE_API_KEY"),
        (HttpClient, "other", "rejects this API key; set another"),
        (AdminClient, None, "needs the admin key; none was sent: set TIDESERVE_ADMIN_KEY"),
        (AdminClient, "other", "rejects this admin key; set TIDESERVE_ADMIN_KEY"),
    ],
)
def test_missing_and_wrong_keys_are_explained(
    url: str, kind: type[HttpClient], key: str | None, message: str
) -> None:
    with kind(url, key) as client, pytest.raises(CommandError, match=message):
        client.get_json("/")
