"""The contents of files: objects in a folder, or in a storage that fsspec has a driver for.

An object appears complete or not at all. A name is used for the same content only, since storages
cannot replace an object depending on its state.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from services.common.errors import ConfigError
from services.common.timeouts import timeout
from services.gateway.batches.errors import BatchStoreDown
from services.gateway.batches.object_store import (
    LocalObjects,
    ObjectSink,
    ObjectSource,
    ObjectStore,
    RemoteObjects,
)

CALL_TIMEOUT_S = 60.0
"""Maximum time to read or write a piece."""
_THREADS = 4

T = TypeVar("T")


class ObjectFiles:
    """Reads and writes objects in threads; each method raises BatchStoreDown if that fails."""

    def __init__(self, url: str) -> None:
        """`url`: a folder, or a URL of fsspec such as s3://bucket/folder. Raises ConfigError."""
        self._store = open_objects(url)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="batch files")

    def close(self) -> None:
        """End the threads after their present calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator["ObjectWriter"]:
        """Write an object, which exists once the block has ended without an exception.

        If nothing was written, there is no object.
        """
        writer = ObjectWriter(self, await self.run(partial(self._store.create, name)))
        try:
            yield writer
            await self.run(writer.sink.commit if writer.size_bytes else writer.sink.abort)
        except BaseException:
            # Shielded: a cancelled upload must not leave its bytes.
            await asyncio.shield(self.run(writer.sink.abort))
            raise

    async def read(self, name: str, offset: int, length: int) -> bytes:
        """Read a part of an object."""
        return await self.run(partial(self._store.read, name, offset, length))

    async def open(self, name: str) -> ObjectSource:
        """Open an object for functions that are passed to `run`."""
        return await self.run(partial(self._store.open, name))

    async def delete(self, name: str) -> None:
        """Delete an object; no effect if there is none."""
        await self.run(partial(self._store.delete, name))

    async def older_than(self, age_s: float) -> Sequence[str]:
        """The names of objects of at least that age, by the clock of the storage's machine."""
        return await self.run(partial(self._store.older_than, age_s))

    async def run(self, call: Callable[[], T]) -> T:
        """Run a function in a thread."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        try:
            async with timeout(CALL_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise BatchStoreDown(
                f"the storage of files did not answer within {CALL_TIMEOUT_S:g} s; retry"
            ) from None
        except OSError as error:
            raise BatchStoreDown("the storage of files failed; retry") from error


class ObjectWriter:
    """An object that is being written."""

    def __init__(self, files: ObjectFiles, sink: ObjectSink) -> None:
        self.sink = sink
        self.size_bytes = 0
        self._files = files
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """The digest of the bytes so far."""
        return self._digest.hexdigest()

    async def write(self, piece: bytes) -> None:
        """Append bytes."""

        def append() -> None:
            self._digest.update(piece)
            self.sink.write(piece)

        await self._files.run(append)
        self.size_bytes += len(piece)


def open_objects(url: str) -> ObjectStore:
    """The storage at a URL. Raises ConfigError."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalObjects(url)
    if scheme == "file":
        return LocalObjects(rest)
    try:
        return RemoteObjects(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"'batch_files' is not usable: {error}; install the driver of {scheme}:// URLs, or name"
            " a folder"
        ) from error
