"""`python -m services.common.probe URL`: exits with 0 if a service is healthy, else 1.

    grpc://HOST:PORT/NAME   health of the service NAME; without a name: of the process
    http://HOST:PORT/PATH   whether the response is 2xx; https:// without certificate verification

For container health checks, so that images need no other program. If TIDESERVE__TLS_CA_FILE is set,
gRPC uses mutual TLS with TIDESERVE__TLS_CERT_FILE and TIDESERVE__TLS_KEY_FILE, and the service must
have the role in NAME, or that of --role. Imports little, since every check starts a new process.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from services.common.role import SERVICE_ROLES, name_of

TIMEOUT_S = 3.0

_TLS_FILES = ("TIDESERVE__TLS_CA_FILE", "TIDESERVE__TLS_KEY_FILE", "TIDESERVE__TLS_CERT_FILE")


class Unhealthy(Exception):
    """The service is unhealthy or does not answer."""


def main(arguments: list[str]) -> int:
    """Returns 0, or 1 after a message on standard error."""
    parser = argparse.ArgumentParser(prog="probe", description="Check the health of a service.")
    parser.add_argument("url", help="grpc://HOST:PORT/NAME or http://HOST:PORT/PATH")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="default: %(default)s"
    )
    parser.add_argument("--role", choices=SERVICE_ROLES, help="expected role of the certificate")
    parsed = parser.parse_args(arguments)
    url = urlsplit(parsed.url)
    probes: dict[str, Callable[[SplitResult, float], None]] = {
        "grpc": partial(probe_grpc, role=parsed.role),
        "http": probe_http,
        "https": probe_http,
    }
    try:
        if url.scheme not in probes or not url.netloc:
            raise Unhealthy(f"'{parsed.url}' is not a URL; write grpc:// or http://, host and port")
        probes[url.scheme](url, parsed.timeout)
    except Unhealthy as error:
        print(f"probe: {error}", file=sys.stderr)
        return 1
    return 0


def probe_http(url: SplitResult, timeout_s: float) -> None:
    """Raises Unhealthy unless the response is 2xx."""
    import http.client
    import ssl

    if url.scheme == "https":
        # The probe sends no secrets, and the certificate's name is the public one.
        context = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            url.netloc, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(url.netloc, timeout=timeout_s)
    try:
        connection.request("GET", (url.path or "/") + (f"?{url.query}" if url.query else ""))
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise Unhealthy(f"{url.geturl()} does not answer: {error}") from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise Unhealthy(f"{url.geturl()} answers {status}")


def probe_grpc(url: SplitResult, timeout_s: float, role: str | None = None) -> None:
    """Raises Unhealthy unless the service is serving."""
    import grpc

    service = url.path.removeprefix("/")
    # tideserve.<role>.v1.<Name>
    named = service.split(".")[1] if service.startswith("tideserve.") else None
    name = service.encode()
    # grpc.health.v1: HealthCheckRequest {string service = 1}, HealthCheckResponse {status = 1}.
    # Encoded by hand: the generated classes take as long to load as the rest of this program.
    request = (b"\x0a" + bytes([len(name)]) + name) if name else b""
    serving = b"\x08\x01"
    with _channel(url.netloc, role or named) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            answer = check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise Unhealthy(f"{url.geturl()} does not answer: {error.code().name}") from error
    if answer != serving:
        raise Unhealthy(f"{url.geturl()} is not serving")


def _channel(address: str, role: str | None):  # type: ignore[no-untyped-def]
    import grpc

    files = [os.environ.get(name) for name in _TLS_FILES]
    if not files[0]:
        return grpc.insecure_channel(address)
    try:
        contents = [Path(file).read_bytes() if file else None for file in files]
    except OSError as error:
        raise Unhealthy(f"cannot read a TLS file: {error}") from error
    if role is None:
        raise Unhealthy("with TLS the role of the expected certificate must be known; add --role")
    options = (("grpc.ssl_target_name_override", name_of(role)),)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*contents), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
