"""HTTPS to a gateway: trusted certificates."""

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certified import DAY, Certified
from tideserve.cli.certificates import write_pair
from tideserve.cli.client import HttpClient
from tideserve.cli.errors import CommandError
from tideserve.cli.host import url_of


class Handler(http.server.BaseHTTPRequestHandler):
    """Responds with {}."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    certified = Certified(tmp_path)
    write_pair(tmp_path, "http", certified.authority.issue("http", ("127.0.0.1",), DAY))
    return certified


@pytest.fixture
def url(certified: Certified) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*[certified.folder / f"http{end}.pem" for end in ("", "-key")])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield url_of("127.0.0.1", server.server_port, tls=True)
        server.shutdown()


def test_a_custom_ca_is_read_from_the_environment(
    certified: Certified, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        HttpClient(url) as client,
        pytest.raises(CommandError, match=r"untrusted certificate .* SSL_CERT_FILE"),
    ):
        client.get_json("/")
    monkeypatch.setenv("SSL_CERT_FILE", str(certified.ca_file))
    with HttpClient(url) as client:
        assert client.get_json("/") == {}


def test_a_local_cluster_needs_no_ca(url: str) -> None:
    with HttpClient(url, own_process=True) as client:
        assert client.get_json("/") == {}
