"""Checks that the gateway is ready and completes a request."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlencode

from services.common.clock import monotonic_s
from tideserve.cli.client import AdminClient, HttpClient
from tideserve.cli.doctor.finding import Check, Finding
from tideserve.cli.errors import CommandError
from tideserve.cli.status import STATUS_PATH

CHECK, COMPLETION, ADMIN_PORT = Check("gateway"), Check("completion"), Check("admin port")
COMPLETION_TIMEOUT_S = 60.0
PROMPT, TOKENS = "The tide comes in", 4


def check_gateway(url: str, api_key: str | None) -> list[Finding]:
    """Check readiness and, if ready, send a completion request for each model."""
    try:
        with HttpClient(url, api_key, COMPLETION_TIMEOUT_S) as client:
            response = client.probe("/ready")
            if response is None:
                return [
                    CHECK.failure(
                        f"no gateway answers at {url}; start it, or correct the URL with --url"
                    )
                ]
            if not response.is_success:
                return [CHECK.failure(_not_ready(url, response))]
            return [
                CHECK.fine(f"{url} is ready"),
                *map(partial(_complete, client), _models(client)),
            ]
    except CommandError as error:
        return [COMPLETION.failure(str(error))]


def _models(client: HttpClient) -> list[str]:
    """A name of each model that the key may use."""
    names: dict[str, str] = {}
    for row in client.get_json("/v1/models")["data"]:
        names.setdefault(row.get("root") or row["id"], row["id"])
    return list(names.values())


def _complete(client: HttpClient, model: str) -> Finding:
    response = client.probe("/ready?" + urlencode({"model": model}))
    if response is None or not response.is_success:
        return COMPLETION.failure(f"{model} has no group that serves it; start its workers")
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
    began_s = monotonic_s()
    pieces = sum(1 for _ in client.post_events("/v1/completions", body))
    if not pieces:
        return COMPLETION.failure(f"{model} returned no output; see the workers' logs")
    return COMPLETION.fine(f"{model} answered within {monotonic_s() - began_s:.1f} s")


def _not_ready(url: str, response: object) -> str:
    try:
        missing = "; ".join(map(str, response.json()["missing"]))  # type: ignore[attr-defined]
    except (ValueError, KeyError, TypeError):
        return f"{url} is not a tideserve gateway; correct the URL with --url"
    return f"the gateway at {url} is not ready ({missing}); wait, or see `tideserve logs`"


def check_admin(url: str, key: str | None) -> tuple[Finding, Mapping[str, Any] | None]:
    """Check that the admin port accepts the admin key; also returns its status, if it does."""
    try:
        with AdminClient(url, key) as client:
            status = client.get_json(STATUS_PATH)
    except CommandError as error:
        return ADMIN_PORT.failure(str(error)), None
    return ADMIN_PORT.fine(f"{url} answers"), status
