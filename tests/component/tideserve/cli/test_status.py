"""`tideserve status` of a local cluster whose gateway, or also etcd, is unreachable."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.common.etcd import Store
from tests.support.admin import members
from tests.support.refusing_address import refusing_address
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.errors import CommandError, Unreachable
from tideserve.cli.status import show_status


def folder_of(root: Path, etcd_url: str) -> ClusterFolder:
    """A state folder as written by `tideserve up`: w0 runs, worker-1 is dead."""
    folder = ClusterFolder(root)
    folder.configs.mkdir(parents=True)
    config = {"etcd_url": etcd_url, "model_name": "m", "model_dir": str(root)}
    folder.write_config("gateway", config)
    pids = {"memmgr": os.getpid()}
    folder.write_state({"pid": os.getpid(), "programs": ["memmgr", "worker-1"], "pids": pids})
    return folder


async def shown(
    capsys: pytest.CaptureFixture[str], url: str, folder: ClusterFolder
) -> tuple[dict[str, Any], str]:
    """The printed JSON, and the error message."""
    with pytest.raises(CommandError) as error:
        await asyncio.to_thread(show_status, url, None, True, False, folder)
    return json.loads(capsys.readouterr().out), str(error.value)


async def test_without_the_gateway_other_services_are_queried(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with members(store):
        with refusing_address() as address:
            status, sentence = await shown(
                capsys, f"http://{address}", folder_of(tmp_path / "cluster", store.url)
            )
    assert [row["id"] for row in status["workers"]] == ["w0", "w1"]
    assert {group["id"] for group in status["groups"]} == {"group-w0", "group-w1"}
    assert {"memmgr", "w0", "w1"} == {row["name"] for row in status["services"]}
    assert status["etcd"]["version"]
    (warning,) = status["warnings"]
    assert warning.startswith("worker-1 is dead")
    assert "the gateway is down" in sentence and "tideserve logs gateway" in sentence


async def test_without_etcd_missing_parts_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refusing_address() as address:
        url = f"http://{address}"
        status, _ = await shown(capsys, url, folder_of(tmp_path / "cluster", url))
    (error,) = status["errors"]
    assert error.startswith(f"etcd at {url} does not answer")
    assert status["warnings"][0].startswith("worker-1 is dead")


def test_a_remote_cluster_is_queried_through_its_gateway_only() -> None:
    with refusing_address() as address, pytest.raises(Unreachable, match="cannot be reached"):
        show_status(f"http://{address}", None, True, False)
