"""HTTP client of a gateway; every failure is a CommandError with a sentence."""

import ipaddress
import json
import ssl
from collections.abc import Generator, Mapping
from typing import Any, BinaryIO, Self

import httpx

from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, Unreachable

CONNECT_TIMEOUT_S = 5.0
# Covers the wait in the scheduler's queue, whose default deadline is two minutes.
STREAM_TIMEOUT_S = 180.0
EVENT_PREFIX = "data:"
LAST_EVENT = "[DONE]"


class HttpClient:
    """A connection to the HTTP server at `url`. Use it as a context manager."""

    headers: Mapping[str, str] = {}
    key_missing = "needs an API key; none was sent: set TIDESERVE_API_KEY or --api-key"
    key_unknown = "rejects this API key; set another with TIDESERVE_API_KEY or --api-key"
    url_hint = "start a cluster with `tideserve up`, or pass its URL with --url or TIDESERVE_URL"

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        *,
        own_process: bool = False,
    ) -> None:
        """`url`: with or without http://; `timeout_s` bounds the wait for each piece of an answer.

        The certificate of an https:// URL must come from a CA of the system or of the file
        SSL_CERT_FILE. `own_process` skips this check for a server started by this process, whose
        certificate may lack the names of this machine.

        Raises:
            CommandError: if the URL is invalid.
        """
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise CommandError(f"'{url}' is not a URL: {error}", EXIT_UNUSABLE) from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise CommandError(
                f"'{url}' is not the URL of a gateway; write it as http://HOST:PORT", EXIT_UNUSABLE
            )
        self._key = api_key
        self._client = httpx.Client(
            base_url=self.url,
            headers={
                **self.headers,
                **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            },
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            # Never use a proxy for this machine.
            trust_env=not _is_loopback(parsed.host),
            verify=_trust(own_process) if parsed.scheme == "https" else True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def probe(self, path: str) -> httpx.Response | None:
        """The response to a GET, None if the server does not answer."""
        try:
            return self._client.get(path)
        except httpx.HTTPError:
            return None

    def get_json(self, path: str) -> Any:
        """The JSON body of a GET. Raises CommandError."""
        return self._json("GET", path)

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON body of the response to a POST. Raises CommandError."""
        return self._json("POST", path, json=body)

    def upload(self, path: str, fields: Mapping[str, str], name: str, file: BinaryIO) -> Any:
        """Post a form with `fields` and the part `file`; returns the JSON. Raises CommandError."""
        return self._json("POST", path, data=fields, files={"file": (name, file)})

    def download(self, path: str, target: BinaryIO) -> None:
        """Write the body of a GET to `target`. Raises CommandError, OSError."""
        try:
            with self._client.stream("GET", path) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                for part in response.iter_bytes():
                    target.write(part)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _json(self, method: str, path: str, **content: Any) -> Any:
        try:
            response = self._client.request(method, path, **content)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        self._check(response)
        return self._decoded(response.text)

    def post_events(
        self, path: str, body: Mapping[str, Any]
    ) -> Generator[dict[str, Any], None, None]:
        """The server-sent events of the response to a POST, as they arrive.

        Closing the iterator disconnects, which cancels the request at the gateway.

        Raises:
            CommandError: if the gateway refuses, reports an error or closes the stream early.
        """
        ended = False
        try:
            with self._client.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                self._check(response)
                for line in response.iter_lines():
                    if not line.startswith(EVENT_PREFIX):
                        continue
                    data = line.removeprefix(EVENT_PREFIX).strip()
                    if data == LAST_EVENT:
                        ended = True
                        break
                    event = self._decoded(data)
                    if not isinstance(event, dict):
                        raise CommandError(f"{self.url} sent an event that is not an object")
                    if "error" in event:
                        raise CommandError(f"the gateway reports: {_message(event)}")
                    yield event
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not ended:
            raise CommandError(f"{self.url} closed the stream early; see `tideserve logs gateway`")

    def _check(self, response: httpx.Response) -> None:
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise CommandError(f"{self.url} {self.key_unknown if self._key else self.key_missing}")
        if response.is_error:
            try:
                reason = _message(response.json())
            except ValueError:
                reason = "no reason in the response; it may not be a tideserve gateway"
            # A caller that waits for something may go on waiting.
            unavailable = response.status_code == httpx.codes.SERVICE_UNAVAILABLE
            kind = Unreachable if unavailable else CommandError
            raise kind(f"{self.url} answers {response.status_code}: {reason}")

    def _decoded(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise CommandError(f"{self.url} is not a tideserve gateway; correct the URL") from error

    def _unreachable(self, error: httpx.HTTPError) -> CommandError:
        if isinstance(error, httpx.TimeoutException):
            cause = "did not answer in time"
        elif "CERTIFICATE_VERIFY_FAILED" in str(error):
            return CommandError(
                f"{self.url} has an untrusted certificate ({error}); set SSL_CERT_FILE to the file"
                " of its CA, and use a host name of the certificate"
            )
        elif isinstance(error, httpx.ConnectError):
            cause = "cannot be reached"
        else:
            cause = f"closed the connection ({error or type(error).__name__})"
        return Unreachable(f"{self.url} {cause}; {self.url_hint}")


class AdminClient(HttpClient):
    """HTTP client of an admin port."""

    headers: Mapping[str, str] = {"X-Tideserve-Admin": "1"}
    key_missing = (
        "needs the admin key; none was sent: set TIDESERVE_ADMIN_KEY or --admin-key to the"
        " gateway's admin_key, or to an admin key of its file"
    )
    key_unknown = (
        "rejects this admin key; set TIDESERVE_ADMIN_KEY or --admin-key to the gateway's"
        " admin_key, or to an admin key of its file"
    )
    url_hint = (
        "start a cluster with `tideserve up`, or pass the admin port of its gateway with"
        " --admin-url or TIDESERVE_ADMIN_URL"
    )


def _trust(own_process: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if own_process:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _message(body: Any) -> str:
    """The message in an OpenAI error body."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "no reason in the response")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
