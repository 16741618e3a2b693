"""Objects in a local folder, and in storages that fsspec has a driver for."""

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from services.common.clock import unix_ns
from services.common.errors import ConfigError

_PART = ".part"
"""Suffix of local files that are being written."""


class ObjectSource(Protocol):
    """An object that is being read from its beginning."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""

    def close(self) -> None:
        """Close it."""


class ObjectSink(Protocol):
    """An object that is being written."""

    def write(self, piece: bytes, /) -> None:
        """Append bytes."""

    def commit(self) -> None:
        """Make the object exist; it survives a loss of power."""

    def abort(self) -> None:
        """Discard the object."""


class ObjectStore(Protocol):
    """A storage of objects; every method blocks, and raises OSError."""

    def create(self, name: str) -> ObjectSink:
        """Begin to write an object."""

    def open(self, name: str) -> ObjectSource:
        """Open an object."""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Read a part of an object."""

    def delete(self, name: str) -> None:
        """Delete an object; no effect if there is none."""

    def older_than(self, age_s: float) -> Sequence[str]:
        """Names of objects of at least that age."""


class LocalObjects:
    """Objects are files below a folder, readable only by its user."""

    def __init__(self, folder: str) -> None:
        """Creates the folder. Raises ConfigError."""
        self._root = Path(folder).absolute()
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the folder of batch files {folder}: {error.strerror}; correct"
                " 'batch_files' or the permissions"
            ) from error

    def create(self, name: str) -> ObjectSink:
        path = self._root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _LocalSink(path, self._root)

    def open(self, name: str) -> ObjectSource:
        return (self._root / name).open("rb")

    def read(self, name: str, offset: int, length: int) -> bytes:
        descriptor = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, length, offset)
        finally:
            os.close(descriptor)

    def delete(self, name: str) -> None:
        path = self._root / name
        path.unlink(missing_ok=True)
        # Each leadership has a folder per batch.
        with contextlib.suppress(OSError):
            for folder in path.parents:
                if folder == self._root:
                    break
                folder.rmdir()

    def older_than(self, age_s: float) -> Sequence[str]:
        before_s = unix_ns() / 1e9 - age_s
        return [
            str(path.relative_to(self._root))
            for path in self._files()
            if path.stat().st_mtime <= before_s
        ]

    def _files(self) -> Iterator[Path]:
        return (path for path in self._root.rglob("*") if path.is_file())


class _LocalSink:
    """Writes beside the file's place, and renames when it is complete."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._root = path, root
        self._part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PART}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._part, flags, 0o600), "wb")

    def write(self, piece: bytes) -> None:
        self._file.write(piece)

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.rename(self._path)
        # The folders may be new as well.
        folder = self._path.parent
        while folder != self._root.parent:
            _sync_folder(folder)
            folder = folder.parent

    def abort(self) -> None:
        try:
            self._file.close()
        finally:
            self._part.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteObjects:
    """Objects of a storage that fsspec has a driver for; closing an object makes it exist."""

    def __init__(self, url: str) -> None:
        """Raises ImportError if the driver is missing, and ValueError for other schemes."""
        # Imported only here: most gateways store files in a folder.
        import fsspec

        self._system, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def create(self, name: str) -> ObjectSink:
        return _RemoteSink(self._system, self._path(name))

    def open(self, name: str) -> ObjectSource:
        source: ObjectSource = self._system.open(self._path(name), "rb")
        return source

    def read(self, name: str, offset: int, length: int) -> bytes:
        content: bytes = self._system.cat_file(self._path(name), offset, offset + length)
        return content

    def delete(self, name: str) -> None:
        try:
            self._system.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def older_than(self, age_s: float) -> Sequence[str]:
        before_s = unix_ns() / 1e9 - age_s
        return [
            path.removeprefix(f"{self._root}/")
            for path in self._system.find(self._root)
            if self._system.modified(path).timestamp() <= before_s
        ]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _RemoteSink:
    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self._file = system.open(path, "wb")

    def write(self, piece: bytes) -> None:
        self._file.write(piece)

    def commit(self) -> None:
        self._file.close()

    def abort(self) -> None:
        with contextlib.suppress(NotImplementedError):
            self._file.discard()
        # A buffered file would write the rest when it is deleted.
        with contextlib.suppress(AttributeError):
            self._file.closed = True
        # Some storages have created the object already.
        with contextlib.suppress(OSError):
            self._system.rm_file(self._path)
