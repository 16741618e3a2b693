"""`tideserve drop` and `tideserve restore`: command, gateway and memory manager are real."""

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
    async with members(store) as (one, two), admin_port(store, tmp_path) as url:
        await asyncio.to_thread(drop, url, None, [])
        assert (one.engine.held, two.engine.held) == ({0, 1}, {2, 3})
        told = capsys.readouterr().out
        assert "group-w0, group-w1 merge: room for 8,200 tokens of KV instead of 3,200" in told
        assert "w0 (layers 0-1) and w1 (layers 2-3) prepare; serving continues" in told
        assert "stable: all members serve epoch" in told
        await asyncio.to_thread(restore, url, None, "group-w0")
        assert (one.engine.held, two.engine.held) == ({0, 1, 2, 3}, {0, 1, 2, 3})


async def test_what_cannot_be_is_one_sentence(store: Store, tmp_path: Path) -> None:
    async with members(store) as (_, two), admin_port(store, tmp_path) as url:
        with pytest.raises(CommandError, match="answers 400: no groups are merged"):
            await asyncio.to_thread(restore, url, None, None)
        with pytest.raises(CommandError, match="no group 'group-9' is serving"):
            await asyncio.to_thread(drop, url, None, ["group-9", "group-w0"])
        two.engine.refuse = "it has no room"
        with pytest.raises(CommandError, match="w1 refused: it has no room"):
            await asyncio.to_thread(drop, url, None, [])


async def test_without_a_memory_manager_it_says_so(store: Store, tmp_path: Path) -> None:
    async with admin_port(store, tmp_path, service="gateway") as url:
        with pytest.raises(CommandError, match="answers 503: no memory manager is leading"):
            await asyncio.to_thread(drop, url, None, [])
