"""Determines the address of a service that it registers in etcd and that other services dial.

A service that listens on all addresses must not register 0.0.0.0. By default it registers the local
address that is used to reach etcd: all services reach etcd, so in container networks, in pods and
between hosts they most likely reach each other at these addresses as well.
"""

import asyncio
import logging
import socket

from services.common.address import (
    host_of,
    is_loopback,
    is_wildcard,
    join_address,
    split_address,
)
from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig

AUTO = "auto"

log = logging.getLogger(__name__)
# Nothing is sent to this port; the kernel only chooses a route.
_ANY_PORT = 2379


def advertised_host(advertise: str, host: str, etcd_url: str) -> str:
    """The host that other services dial, without brackets; may resolve names.

    `advertise` and `etcd_url` as configured; `host` is the listening address.

    Raises:
        ConfigError: if `advertise` is auto and etcd is not reachable from any local address.
    """
    if advertise != AUTO:
        return _parsed(advertise)[0]
    if not is_wildcard(host):
        return host.strip("[]")
    # A socket on 0.0.0.0 does not accept IPv6; a socket on :: accepts both.
    families = (socket.AF_INET, socket.AF_INET6) if ":" in host else (socket.AF_INET,)
    for endpoint in etcd_url.split(","):
        name, port = split_address(endpoint.strip().rpartition("//")[2].rstrip("/"))
        for family in families:
            local = _local_address(family, name, port)
            if local:
                return local
    raise ConfigError(
        f"no address of this machine has a route to etcd at {etcd_url}, so none can be advertised;"
        " set 'advertise' to the host name or address at which others reach this service"
    )


def advertised_address(advertise: str, host: str, port: int, etcd_url: str) -> str:
    """host:port at which other services reach the gRPC port bound to `host` and `port`.

    Raises:
        ConfigError: see `advertised_host`.
    """
    chosen = None if advertise == AUTO else _parsed(advertise)[1]
    return join_address(advertised_host(advertise, host, etcd_url), chosen or port)


async def advertised(config: ServiceConfig, host: str, port: int) -> str:
    """`advertised_address` of a service, off the event loop. Raises ConfigError.

    Warns if the service listens on all addresses but advertises a loopback address.
    """
    address = await asyncio.to_thread(
        advertised_address, config.advertise, host, port, config.etcd_url
    )
    if is_wildcard(host) and await asyncio.to_thread(is_loopback, host_of(address)):
        log.warning(
            "this service listens on all addresses, but is registered at %s, which only this"
            " machine can reach; set 'advertise' to an address that other machines reach, or listen"
            " on 127.0.0.1 if there are none",
            address,
        )
    return address


def _parsed(advertise: str) -> tuple[str, int | None]:
    host, port = split_address(advertise.strip())
    if not host or is_wildcard(host) or (port and not port.isdecimal()):
        raise ConfigError(
            f"'advertise' is '{advertise}', but must be auto, or a host or host:port that others"
            " can dial (an IPv6 address with a port needs brackets)"
        )
    if port and not 0 < int(port) < 65536:
        raise ConfigError(f"the port in 'advertise' is {port}, but must be 1 to 65535")
    return host, int(port) if port else None


def _local_address(family: socket.AddressFamily, name: str, port: str) -> str:
    """The local address from which the kernel would reach `name`; "" without a route."""
    try:
        targets = socket.getaddrinfo(name, port or _ANY_PORT, family, socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return ""
    for _, kind, protocol, _, target in targets:
        with socket.socket(family, kind, protocol) as probe:
            try:
                # A datagram socket sends nothing here: it only selects a route.
                probe.connect(target)
            except OSError:
                continue
            local = str(probe.getsockname()[0])
            if not is_wildcard(local):
                return local
    return ""
