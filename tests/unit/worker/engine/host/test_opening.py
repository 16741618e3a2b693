"""Opening of host copies: size, link, and configuration errors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.common.device_profile import load_profile
from services.common.errors import ConfigError
from services.worker.config import WorkerConfig
from services.worker.engine.host import opening
from services.worker.engine.host.opening import open_host
from services.worker.engine.host.store import HostMemoryError
from services.worker.host_config import HostConfig
from tests.support.fake_model import BLOCKS, FAKE, LAYERS, SHAPE, load_fake

BLOCK_BYTES = LAYERS * SHAPE.size_bytes
GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 GiB, of which 4 are available, and a link of 2 GB/s."""
    monkeypatch.setattr(opening, "limit_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(opening, "available_bytes", lambda: 4 * GIB)
    link = SimpleNamespace(bytes_per_s=2e9)
    monkeypatch.setattr(opening, "measure_host_link", lambda device, size: link)


def opened(paced: Any = None, stored: Any = None, **host: Any) -> Any:
    config = WorkerConfig(
        model_name="m",
        model_dir=Path("/m"),
        memory_bytes=GIB,
        etcd_url="http://etcd:2379",
        host_copies=HostConfig(**host),
    )
    runner = load_fake(FAKE)
    try:
        return open_host(config, runner, paced, stored)
    finally:
        runner.close()


def test_by_default_there_are_no_host_copies() -> None:
    assert opened() is None


def test_the_store_has_the_blocks_that_fit() -> None:
    tier = opened(host_memory=10 * BLOCK_BYTES + 5)
    assert tier.store.slots_max == 10
    assert tier.settings.block_bytes == BLOCK_BYTES
    assert tier.settings.link_bytes_per_s == 2e9, "measured"
    assert not tier.lane.paced


def test_auto_equals_the_size_of_the_kv_cache() -> None:
    assert opened(host_memory=-1).store.slots_max == BLOCKS


def test_auto_is_at_most_a_quarter_of_the_available_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "available_bytes", lambda: 12 * BLOCK_BYTES)
    assert opened(host_memory=-1).store.slots_max == 3


def test_a_limit_below_the_host_memory_is_an_error() -> None:
    with pytest.raises(HostMemoryError, match="'host_memory' is 7680 MiB and 'memory' 1024 MiB"):
        opened(host_memory=15 * GIB // 2)


def test_a_configured_link_replaces_the_measured_one() -> None:
    assert opened(host_memory=GIB, host_link_bytes_per_s=7e9).settings.link_bytes_per_s == 7e9


def test_the_link_of_a_stored_profile_is_used() -> None:
    stored = cast(Any, SimpleNamespace(host_link_bytes_per_s=3e9))
    assert opened(stored=stored, host_memory=GIB).settings.link_bytes_per_s == 3e9
    stored.host_link_bytes_per_s = None
    assert opened(stored=stored, host_memory=GIB).settings.link_bytes_per_s == 2e9


def test_a_paced_engine_has_the_blocks_and_link_of_the_modelled_device() -> None:
    paced = load_profile("A100-14B:2")
    tier = opened(paced=paced, host_memory=GIB)
    assert paced.kv_bytes_per_token is not None
    assert tier.settings.block_bytes == paced.kv_bytes_per_token * SHAPE.block_size
    assert tier.settings.link_bytes_per_s == 1.25e10
    assert tier.lane.paced
    assert tier.lane.block_s == tier.settings.block_bytes / 1.25e10


def test_a_profile_without_a_link_is_an_error() -> None:
    paced = cast(Any, SimpleNamespace(name="p", kv_bytes_per_token=3, host_link_bytes_per_s=None))
    with pytest.raises(ConfigError, match="which the profile p lacks"):
        opened(paced=paced, host_memory=GIB)
