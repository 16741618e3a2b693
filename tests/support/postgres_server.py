"""A real PostgreSQL server for tests: an ephemeral port, a temporary folder, kill and restart."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from services.gateway.batches.schema import metadata

READY_TIMEOUT_S = 60.0
USER = "postgres"
# Where Debian's packages install, besides PATH.
FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)

# As in tests/support/etcd_server.py: the server ends with the test process. The server refuses to
# run as root, and another user may not read this Python.
_LAUNCHER = """
import ctypes, os, pwd, signal, sys
if sys.argv[1]:
    user = pwd.getpwnam(sys.argv[1])
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
ctypes.CDLL(None).prctl(1, signal.SIGQUIT, 0, 0, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""


def postgres_binary(name: str) -> str | None:
    """Path of a PostgreSQL program; None if it is not installed."""
    on_path = shutil.which(name)
    if on_path is not None:
        return on_path
    return next((str(folder / name) for folder in FOLDERS if (folder / name).exists()), None)


class PostgresServer:
    """One server on loopback. `start` after `stop` or `kill` continues with port and data."""

    def __init__(self, folder: Path) -> None:
        """`folder` must be accessible to the user `postgres` if this process is root's."""
        self._data = folder / "data"
        self._log = folder / "log"
        self._user = USER if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        subprocess.run(
            [_needed("initdb"), "-D", self._data, "-U", USER, "-A", "trust", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            user=self._user,
            cwd=folder,
        )

    @property
    def url(self) -> str:
        """The URL for the gateway's option `batch_store`."""
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Start it and wait until it accepts connections."""
        options = {
            "port": self._port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
        }
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _LAUNCHER, self._user or ""),
                    *(_needed("postgres"), "-D", self._data, *arguments),
                ],
                stdout=log,
                stderr=log,
                cwd=self._data,
            )
        until_s = time.monotonic() + READY_TIMEOUT_S
        ready = [_needed("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        while subprocess.run(ready, check=False).returncode != 0:
            assert time.monotonic() < until_s, self._log.read_text()
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)

    def clear(self) -> None:
        """Drop the tables of the batch store."""
        engine = create_engine(self.url)
        metadata.drop_all(engine)
        engine.dispose()

    def kill(self) -> None:
        """Stop it immediately, which breaks all connections."""
        if self._process is not None:
            # Not SIGKILL, after which the next start would wait for the server's children.
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None


def _needed(name: str) -> str:
    path = postgres_binary(name)
    if path is None:
        raise FileNotFoundError(f"no {name}: install Debian's package postgresql")
    return path


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server, removed at the end; skips the test where it is not installed."""
    if postgres_binary("postgres") is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs Debian's package postgresql, and psycopg")
    # Not pytest's folder, which only its user may enter.
    folder = Path(tempfile.mkdtemp(prefix="tideserve-postgres-"))
    server = PostgresServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
