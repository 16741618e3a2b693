"""Parses, resolves and binds addresses of the form host:port, with brackets around IPv6."""

import asyncio
import errno
import ipaddress
import socket

from services.common.errors import ConfigError


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, str]:
    """Host without brackets, and port; the port is "" if it is missing."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    if address.count(":") > 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port


def host_of(address: str) -> str:
    """The host of host:port, without brackets."""
    return split_address(address)[0]


def is_ip(host: str) -> bool:
    """Whether `host` is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Whether `host` means all addresses of a machine, so that no peer can dial it."""
    bare = host.strip("[]")
    return bare == "" or (is_ip(bare) and ipaddress.ip_address(bare).is_unspecified)


async def resolved(address: str) -> str:
    """host:port with the host name resolved to an IP address, for callers that must not block.

    Raises:
        ConfigError: if the name cannot be resolved, or the text is not host:port.
    """
    host, port = split_address(address)
    if not host or not port.isdecimal():
        raise ConfigError(f"'{address}' is not host:port")
    if is_ip(host):
        return address
    try:
        resolved_to = await asyncio.get_running_loop().getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(
            f"the name '{host}' cannot be resolved here; set 'advertise' of that service to an IP"
            " address, or add the name to the DNS server"
        ) from error
    return join_address(str(resolved_to[0][4][0]), int(port))


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only; resolves names. False if unresolvable."""
    try:
        infos = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]
    return all(address.is_loopback for address in addresses)


def listen(host: str, port: int, backlog: int, stall_s: float | None = None) -> socket.socket:
    """A listening TCP socket on a name or address of this machine; port 0: any free port.

    The kernel resets connections that accept no data for `stall_s`.

    Raises:
        ConfigError: if the address is not local or the port is not available.
    """
    bare = host.strip("[]")
    try:
        family, kind, protocol, _, bind_address = socket.getaddrinfo(
            bare or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Pass the protocol number, without which asyncio does not set TCP_NODELAY.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"'{host}' is not a local address: {error.strerror}") from error
    try:
        # Allow a restart while old connections are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if stall_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
        listener.bind(bind_address)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop its listener or choose another port"
            ) from error
        raise ConfigError(
            f"cannot listen on {join_address(host, port)}: {error.strerror}; choose another port"
        ) from error
    return listener
