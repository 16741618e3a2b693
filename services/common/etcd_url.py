"""Parses etcd URLs from the configuration and the command line."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from services.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses (host:port) of the members of an etcd cluster, and whether they use TLS."""

    addresses: tuple[str, ...]
    tls: bool


def parse_urls(urls: str) -> Endpoints:
    """The endpoints in `urls`: HOST:PORT, optionally with http:// or https://, comma-separated.

    Raises:
        ConfigError: if a part is not such a URL, or only some are https://.
    """
    # Check first, because urlsplit accepts credentials.
    refuse_user(urls)
    addresses, schemes = [], set()
    for url in (part.strip() for part in urls.split(",")):
        scheme, address = _parse(url)
        addresses.append(address)
        schemes.add(scheme)
    if len(schemes) > 1:
        raise ConfigError(
            f"some of the etcd URLs {urls} are https:// and some are not; use https:// for all or"
            " none"
        )
    return Endpoints(tuple(addresses), schemes == {"https"})


def refuse_user(urls: str) -> None:
    """Raise ConfigError if `urls` contain credentials, because URLs are logged."""
    if "@" in urls:
        raise ConfigError(
            "an etcd URL contains credentials; set 'etcd_user' and 'etcd_password' instead"
        )


def _parse(url: str) -> tuple[str, str]:
    """Scheme and host:port of a URL."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if (
        not host
        or not port
        or parts.scheme not in ("http", "https")
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
    ):
        raise ConfigError(
            f"'{url}' is not an etcd URL; write http://HOST:PORT or https://HOST:PORT, with commas"
            " between several"
        )
    return parts.scheme, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
