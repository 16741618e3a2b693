"""Headers and metadata that decide about a request, so that it may have each only once.

Proxies and gateways disagree on which of two equal headers counts; a client could pass one to the
proxy's checks and the other to the gateway.
"""

from collections.abc import Iterable

from services.gateway.serving.service_policy import SLO_HEADERS
from services.gateway.vocabulary.errors import BadRequest

SINGLE_HEADERS = frozenset(
    {
        "authorization",
        "content-encoding",
        "content-type",
        "host",
        "idempotency-key",
        "origin",
        "x-api-key",
        "x-request-id",
        "x-tideserve-admin",
        *SLO_HEADERS,
    }
)


def check_single(names: Iterable[str]) -> None:
    """Check the header names of a request, in lower case.

    Raises:
        BadRequest: if one of `SINGLE_HEADERS` is repeated.
    """
    seen = set[str]()
    for name in names:
        if name in seen:
            raise BadRequest(
                f"the header '{name}' is repeated; send it once", code="repeated_header"
            )
        if name in SINGLE_HEADERS:
            seen.add(name)
