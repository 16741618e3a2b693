"""`tideserve drop` and `tideserve restore` with real gateway and memory manager."""

import asyncio
from pathlib import Path

import pytest

from services.common.etcd import Store
from tests.support.admin import admin_port, members
from tideserve.cli.errors import CommandError
from tideserve.cli.groups import drop, restore


async def test_drop_and_restore(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with members(store) as (first, second), admin_port(store, tmp_path) as url:
        await asyncio.to_thread(drop, url, None, [])
        assert (first.engine.held, second.engine.held) == ({0, 1}, {2, 3})
        printed = capsys.readouterr().out
        assert "group-w0, group-w1 merge: room for 8,200 tokens of KV instead of 3,200" in printed
        assert "w0 (layers 0-1) and w1 (layers 2-3) prepare; serving continues" in printed
        assert "stable: all members serve epoch" in printed
        await asyncio.to_thread(restore, url, None, "group-w0")
        assert (first.engine.held, second.engine.held) == ({0, 1, 2, 3}, {0, 1, 2, 3})


async def test_impossible_changes_are_refused_in_one_sentence(store: Store, tmp_path: Path) -> None:
    async with members(store) as (_, second), admin_port(store, tmp_path) as url:
        with pytest.raises(CommandError, match="answers 400: no groups are merged"):
            await asyncio.to_thread(restore, url, None, None)
        with pytest.raises(CommandError, match="no group 'group-9' is serving"):
            await asyncio.to_thread(drop, url, None, ["group-9", "group-w0"])
        second.engine.refuse = "it has no room"
        with pytest.raises(CommandError, match="w1 refused: it has no room"):
            await asyncio.to_thread(drop, url, None, [])


async def test_a_missing_memory_manager_is_reported(store: Store, tmp_path: Path) -> None:
    async with admin_port(store, tmp_path, service="gateway") as url:
        with pytest.raises(CommandError, match="answers 503: no memory manager is leading"):
            await asyncio.to_thread(drop, url, None, [])
