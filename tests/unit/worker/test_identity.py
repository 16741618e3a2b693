"""A worker without a configured name and folder, as in a Deployment."""

import socket
from pathlib import Path

import pytest

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.common.records import CAN_DROP, HAND_OVER
from services.worker.config import WorkerConfig
from services.worker.identity import completed_config, worker_record
from services.worker.ipc import EngineReady


def config(**fields: object) -> WorkerConfig:
    given = {"etcd_url": "e", "model_name": "m", "model_dir": "/m", "memory_bytes": 1}
    return from_mapping(WorkerConfig, given | fields, "a test")


def test_the_default_name_is_the_host_and_the_folder_is_temporary() -> None:
    with completed_config(config()) as completed:
        assert completed.worker_id == socket.gethostname()
        assert completed.run_dir is not None
        assert completed.run_dir.stat().st_mode & 0o777 == 0o700
        (completed.run_dir / "engine.sock").touch()
    assert not completed.run_dir.exists()


def test_the_folder_is_removed_if_the_worker_fails(tmp_path: Path) -> None:
    folders = []
    with pytest.raises(ZeroDivisionError), completed_config(config()) as completed:
        folders.append(completed.run_dir)
        raise ZeroDivisionError
    assert folders[0] is not None and not folders[0].exists()


def test_configured_names_and_folders_are_kept(tmp_path: Path) -> None:
    with completed_config(config(worker_id="w-1.a", run_dir=str(tmp_path))) as completed:
        assert (completed.worker_id, completed.run_dir) == ("w-1.a", tmp_path)
    assert tmp_path.exists()


@pytest.mark.parametrize("name", ["a/b", " ", "-a", "ä", "a" * 254])
def test_a_name_invalid_in_keys_is_refused(name: str) -> None:
    with (
        pytest.raises(ConfigError, match="'worker_id' is"),
        completed_config(config(worker_id=name)),
    ):
        pass


def test_the_memory_that_an_engine_reports_is_registered() -> None:
    facts = EngineReady(64, 9, 16, 4, 512, 10, 3, 1, arena_bytes=96, chunk_bytes=8)
    record = worker_record(config(worker_id="w0"), "i", "digest", "h:1", facts)
    assert (record.arena_bytes, record.chunk_bytes, record.kv_blocks_total) == (96, 8, 4)
    assert record.no_drops == ""


def test_a_worker_without_lanes_registers_the_reason() -> None:
    facts = EngineReady(64, 9, 16, 4, 512, 10, 3, 1, no_drops="UCX cannot be loaded")
    record = worker_record(config(worker_id="w0"), "i", "digest", "h:1", facts)
    assert record.no_drops == "UCX cannot be loaded"
    assert CAN_DROP not in record.capabilities


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("lanes", [True, False])
def test_a_worker_with_lanes_and_a_prefix_cache_hands_over(caches: bool, lanes: bool) -> None:
    address = "h:2" if lanes else ""
    facts = EngineReady(
        *(64, 9, 16, 4, 512, 10, 3, 1), activation_address=address, bulk_address=address
    )
    record = worker_record(config(prefix_caching=caches), "i", "digest", "h:1", facts)
    assert (HAND_OVER in record.capabilities) == (caches and lanes)
