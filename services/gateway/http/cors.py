"""CORS: responses to browser pages of the configured origins.

Browsers send preflight requests without a key, so this middleware precedes the key check. It never
allows browser credentials (cookies): a page must send an API key itself.
"""

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from services.common.errors import ConfigError

ANY = "*"
PREFLIGHT_CACHE_S = 600
"""Seconds that a browser caches the response to a preflight request."""
METHODS = ("GET", "POST")
EXPOSED = (
    "idempotent-replayed",
    "retry-after",
    "warning",
    "x-request-id",
    *(
        f"x-ratelimit-{kind}-{limit}"
        for kind in ("limit", "remaining", "reset")
        for limit in ("requests", "tokens")
    ),
)
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")


def origins_of(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of origins. Raises ConfigError."""
    origins = tuple(part.strip() for part in text.split(",") if part.strip())
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"'cors_origins' has {origin!a}, which is not an origin; use the form"
                " https://app.example or http://localhost:3000, or * for all"
            )
    return origins


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wrap `app` in the CORS middleware; return `app` itself without origins."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        # Allow all requested headers: client libraries send many headers of their own.
        allow_headers=[ANY],
        allow_credentials=False,
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_CACHE_S,
    )
