"""The advertised address of a service: configured, or the local address towards etcd."""

import socket

import pytest

from services.common.address import (
    host_of,
    is_loopback,
    is_wildcard,
    join_address,
    listen,
    resolved,
    split_address,
)
from services.common.advertise import advertised, advertised_address, advertised_host
from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig


def can_ipv6() -> bool:
    try:
        listen("::1", 0, 1).close()
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a:1", "a", "1"),
        ("a", "a", ""),
        ("10.0.0.1:50051", "10.0.0.1", "50051"),
        ("[::1]:50051", "::1", "50051"),
        ("[::1]", "::1", ""),
        ("::1", "::1", ""),
        ("", "", ""),
    ],
)
def test_addresses_are_split(text: str, host: str, port: str) -> None:
    assert split_address(text) == (host, port)
    assert host_of(text) == host


@pytest.mark.parametrize("host", ["worker-0", "10.0.0.1", "fd00::1"])
def test_joined_addresses_are_split_again(host: str) -> None:
    assert split_address(join_address(host, 7)) == (host, "7")
    assert join_address(f"[{host}]", 7) == join_address(host, 7)


def test_wildcard_addresses_are_recognised() -> None:
    assert all(map(is_wildcard, ("", "0.0.0.0", "::", "[::]")))
    assert not any(map(is_wildcard, ("127.0.0.1", "::1", "scheduler")))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_names_and_addresses_are_recognised(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "no-such-name.invalid"])
def test_other_addresses_are_reachable_from_elsewhere(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["10.1.2.3", "scheduler", "127.0.0.1"])
def test_a_specific_listening_address_is_advertised_unchanged(host: str) -> None:
    assert advertised_address("auto", host, 7, "http://127.0.0.1:2379") == f"{host}:7"


def test_a_wildcard_listener_advertises_its_address_towards_etcd() -> None:
    """A route to 127.0.0.2 starts at 127.0.0.1 on Linux, so the kernel was asked."""
    for url in ("127.0.0.2:2379", "http://127.0.0.2:2379/", "https://127.0.0.2:1,https://a:1"):
        assert advertised_address("auto", "0.0.0.0", 50051, url) == "127.0.0.1:50051"


@pytest.mark.skipif(not can_ipv6(), reason="this machine has no IPv6")
def test_an_ipv6_address_is_advertised_in_brackets() -> None:
    assert advertised_address("auto", "::", 50051, "http://[::1]:2379") == "[::1]:50051"
    with pytest.raises(ConfigError, match="set 'advertise'"):
        advertised_host("auto", "0.0.0.0", "http://[::1]:2379")


def test_an_unresolvable_endpoint_is_skipped_if_another_resolves() -> None:
    url = "http://no-such-name.invalid:2379,http://127.0.0.1:2379"
    assert advertised_host("auto", "0.0.0.0", url) == "127.0.0.1"


def test_a_missing_address_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match="set 'advertise' to the host name or address"):
        advertised_host("auto", "0.0.0.0", "http://no-such-name.invalid:2379")


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        ("worker-7.workers", "worker-7.workers:50051"),
        ("worker-7:1234", "worker-7:1234"),
        ("fd00::7", "[fd00::7]:50051"),
        ("[fd00::7]:1234", "[fd00::7]:1234"),
    ],
)
def test_a_configured_address_takes_precedence(advertise: str, address: str) -> None:
    assert advertised_address(advertise, "0.0.0.0", 50051, "http://127.0.0.1:1") == address


@pytest.mark.parametrize("advertise", ["", "0.0.0.0", "[::]:1", "a:b", "a:0", "a:70000"])
def test_undialable_addresses_are_refused(advertise: str) -> None:
    with pytest.raises(ConfigError, match="advertise"):
        advertised_address(advertise, "0.0.0.0", 50051, "http://127.0.0.1:1")


async def test_names_are_resolved_and_addresses_left_alone() -> None:
    assert await resolved("10.0.0.1:7") == "10.0.0.1:7"
    assert await resolved("[fd00::1]:7") == "[fd00::1]:7"
    assert await resolved("localhost:7") in ("127.0.0.1:7", "[::1]:7")
    for address in ("no-such-name.invalid:7", "a", "a:b", "", ":7"):
        with pytest.raises(ConfigError):
            await resolved(address)


def test_listening_resolves_a_name_and_refuses_a_port_in_use() -> None:
    with listen("localhost", 0, 1) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another port"):
            listen("localhost", port, 1)
        with socket.create_connection(listener.getsockname()[:2], timeout=5):
            pass
    with pytest.raises(ConfigError, match="is not a local address"):
        listen("no-such-name.invalid", 0, 1)


@pytest.mark.parametrize(
    ("host", "advertise", "warns"),
    [
        ("0.0.0.0", "auto", True),
        ("0.0.0.0", "192.0.2.7", False),
        ("127.0.0.1", "auto", False),
    ],
)
async def test_a_loopback_service_warns_if_it_listens_everywhere(
    host: str, advertise: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServiceConfig(etcd_url="http://127.0.0.1:2379", advertise=advertise)
    await advertised(config, host, 50051)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warns
    assert all(
        "127.0.0.1:50051" in message and "set 'advertise'" in message for message in messages
    )
