"""The status that a cluster reports at its admin port."""

import json
from collections.abc import Mapping
from typing import Any

from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import fetch


def read_status(url: str) -> Mapping[str, Any]:
    """Read the rows of `workers`, `groups` and more. Raises SystemUnavailable."""
    try:
        status: Mapping[str, Any] = json.loads(fetch(f"{url}/tideserve/v1/status"))
    except (OSError, ValueError) as error:
        raise SystemUnavailable(f"{url} does not report its status: {error}") from error
    if not {"workers", "groups"} <= status.keys():
        raise SystemUnavailable(f"{url} does not report its status: {status}")
    return status
