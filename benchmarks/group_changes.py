"""Merges, splits and moves by hand: `tideserve drop`, `tideserve restore`, `tideserve move`."""

import json
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode

from services.common.clock import monotonic_s

MERGE_PATH = "/tideserve/v1/groups/merge"
SPLIT_PATH = "/tideserve/v1/groups/split"
MOVE_PATH = "/tideserve/v1/requests/move"
STEP_TIMEOUT_S = 120.0
RETRY_S = 0.1
DATA = b"data:"


class ChangeFailed(Exception):
    """The groups did not change in time; the message is the last reply of the cluster."""


def change_groups(url: str, path: str, timeout_s: float) -> int:
    """Repeat the request to the admin port at `url` until it succeeds; returns the refusals before.

    Raises:
        ChangeFailed: if the change is still refused after `timeout_s`.
    """
    deadline_s = monotonic_s() + timeout_s
    refused = 0
    while (message := _try(url + path)) != "":
        refused += 1
        if monotonic_s() > deadline_s:
            raise ChangeFailed(message)
        time.sleep(RETRY_S)
    return refused


def move_requests(url: str, source: str, target: str, requests_max: int) -> None:
    """Move at most `requests_max` running requests of a worker to another, and wait for the end.

    Raises:
        ChangeFailed: if the cluster at the admin port `url` refuses, or does not answer.
    """
    query = urlencode({"source": source, "target": target, "requests": requests_max})
    try:
        _post(f"{url}{MOVE_PATH}?{query}").close()
    except OSError as error:
        raise ChangeFailed(str(error) or type(error).__name__) from error


def _post(url: str) -> Any:
    """The open response of the admin port. Raises OSError."""
    request = urllib.request.Request(url, data=b"{}", method="POST")
    request.add_header("Content-Type", "application/json")
    request.add_header("X-Tideserve-Admin", "1")
    # Bypass proxies: the cluster is local.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=STEP_TIMEOUT_S)


def _try(url: str) -> str:
    """Request the change; returns the error, "" on success."""
    phase, message = "", "the reply was cut off"
    try:
        with _post(url) as response:
            for line in response:
                if line.startswith(DATA) and b"{" in line:
                    step = json.loads(line[len(DATA) :])
                    phase = step.get("phase", "failed")
                    message = step.get("message") or str(step.get("error"))
    except urllib.error.HTTPError as error:
        return error.read().decode("utf-8", "replace")[:500] or f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return "" if phase == "stable" else message
