"""Checks the address and the key of a server with OpenAI's API."""

import re

# Scheme, host or IPv6 address in brackets, and port.
_UPSTREAM_URL = re.compile(
    r"https?://([^/?#@\s:\[\]]+|\[[0-9a-fA-F:.]+\])(:(?P<port>[0-9]{1,5}))?/?"
)
PORT_MAX = 65535
# Other characters end or break the header that carries the key.
UPSTREAM_KEY = re.compile(r"[!-~]+")


def is_upstream_url(url: str) -> bool:
    """Whether `url` is the address of a server, without a path and a password."""
    match = _UPSTREAM_URL.fullmatch(url)
    return match is not None and int(match["port"] or 0) <= PORT_MAX
