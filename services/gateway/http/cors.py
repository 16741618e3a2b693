"""Answers to browsers whose pages are of another origin, where the settings allow some.

A browser asks before it sends such a page's request, and it asks without a key: so this stands
before the front door. Credentials of the browser's own (cookies) are never allowed: the key is what
counts, and a page has to hold that itself.
"""

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from services.common.errors import ConfigError

ANY = "*"
ASK_AGAIN_S = 600
METHODS = ("GET", "POST")
EXPOSED = (
    "idempotent-replayed",
    "retry-after",
    "warning",
    "x-request-id",
    *(
        f"x-ratelimit-{what}-{limit}"
        for what in ("limit", "remaining", "reset")
        for limit in ("requests", "tokens")
    ),
)
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")


def origins_of(text: str) -> tuple[str, ...]:
    """The origins in a setting, separated by commas. Raises ConfigError."""
    origins = tuple(part.strip() for part in text.split(",") if part.strip())
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"'cors_origins' has {origin!a}, which is no origin; write them as browsers do,"
                " such as https://app.example or http://localhost:3000, or * for all"
            )
    return origins


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, which answers pages of these origins; itself if there are none."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        # The headers that the browser asks for: client libraries have many headers of their own.
        allow_headers=[ANY],
        allow_credentials=False,
        expose_headers=EXPOSED,
        max_age=ASK_AGAIN_S,
    )
