import sys

import pytest

from services.worker.engine.transfer.errors import UcxUnavailable
from services.worker.engine.transfer.ucx_config import UcxConfig
from services.worker.engine.transfer.ucx_transport import UcxTransport, load_ucxx


def test_missing_ucx_is_a_short_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libucx", None)
    with pytest.raises(UcxUnavailable, match="serves alone and cannot merge"):
        load_ucxx()


def test_an_unknown_transport_is_a_short_error() -> None:
    try:
        load_ucxx()
    except UcxUnavailable as error:
        pytest.skip(str(error))
    with pytest.raises(UcxUnavailable, match="choose other transports"):
        UcxTransport(UcxConfig("no_such_transport", "no_such_device"))


def test_an_endpoint_reports_its_routes() -> None:
    try:
        first, second = UcxTransport(UcxConfig("tcp", "lo")), UcxTransport(UcxConfig("tcp", "lo"))
    except UcxUnavailable as error:
        pytest.skip(str(error))
    assert set(first.open(second.address).routes) == {"tcp/lo"}


def test_two_workers_of_one_machine_share_memory() -> None:
    try:
        first, second = UcxTransport(UcxConfig()), UcxTransport(UcxConfig())
    except UcxUnavailable as error:
        pytest.skip(str(error))
    routes = first.open(second.address).routes
    assert any(route.endswith("/memory") for route in routes), routes


def test_the_address_is_available_during_a_ucx_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine dials meanwhile, on another thread."""
    try:
        transport = UcxTransport(UcxConfig())
    except UcxUnavailable as error:
        pytest.skip(str(error))
    before = transport.address
    open_worker = transport._open_worker
    asked: list[bytes] = []

    def ask_first() -> None:
        asked.append(transport.address)
        transport.progress()
        open_worker()

    monkeypatch.setattr(transport, "_open_worker", ask_first)
    transport.renew()
    assert asked == [before] != [transport.address]
