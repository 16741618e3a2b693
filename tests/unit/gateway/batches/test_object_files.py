"""An object appears complete or not at all, in a folder and in a storage of fsspec."""

import asyncio
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.gateway.batches import object_store
from services.gateway.batches.errors import BatchStoreDown
from services.gateway.batches.object_files import ObjectFiles


@pytest.fixture(params=["folder", "file", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectFiles]:
    url = {
        "folder": f"{tmp_path}/objects",
        "file": f"file://{tmp_path}/objects",
        "memory": f"memory://{tmp_path}/objects",
    }[request.param]
    opened = ObjectFiles(url)
    yield opened
    opened.close()


async def test_an_object_is_read_back(files: ObjectFiles) -> None:
    content = os.urandom(3 * 2**20 + 5)
    async with files.writing("a/b.jsonl") as writer:
        await writer.write(content[:100])
        await writer.write(content[100:])
    assert writer.size_bytes == len(content)
    assert writer.sha256 == hashlib.sha256(content).hexdigest()
    assert await files.read("a/b.jsonl", 0, len(content) + 1) == content
    assert await files.read("a/b.jsonl", 90, 20) == content[90:110]
    assert await files.older_than(0) == ["a/b.jsonl"] and await files.older_than(60) == []
    await files.delete("a/b.jsonl")
    await files.delete("a/b.jsonl")
    assert await files.older_than(0) == []
    with pytest.raises(BatchStoreDown):
        await files.read("a/b.jsonl", 0, 1)


async def test_an_object_that_failed_or_is_empty_does_not_exist(files: ObjectFiles) -> None:
    with pytest.raises(ValueError):
        async with files.writing("x") as writer:
            await writer.write(b"half")
            raise ValueError
    async with files.writing("y"):
        pass
    started = asyncio.Event()

    async def upload() -> None:
        async with files.writing("z") as writer:
            await writer.write(b"half")
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(upload())
    await started.wait()
    task.cancel()
    await asyncio.wait([task])
    assert await files.older_than(0) == []


async def test_files_are_private_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    files = ObjectFiles(f"{tmp_path}/objects")
    async with files.writing("a/b") as writer:
        await writer.write(b"x")
    root = tmp_path / "objects"
    assert [path.partition(".")[0] for path in synced] == [
        str(root / "a/b"),
        f"{root}/a",
        str(root),
    ]
    assert {path.stat().st_mode & 0o777 for path in root.rglob("*")} == {0o700, 0o600}
    files.close()


async def test_a_full_disk_is_503_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ObjectFiles(str(tmp_path))

    def full(self: object, piece: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(object_store._LocalSink, "write", full)
    with pytest.raises(BatchStoreDown) as raised:
        async with files.writing("x") as writer:
            await writer.write(b"half")
    assert raised.value.status == 503 and await files.older_than(0) == []
    files.close()


@pytest.mark.parametrize("url", ["nowhere://x", "s3x://bucket"])
def test_a_url_without_a_driver_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="install the driver"):
        ObjectFiles(url)
