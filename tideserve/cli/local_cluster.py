"""A cluster of `tideserve up` in a temporary folder, for the demo, benchmarks and tests."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from random import sample
from typing import Any

import yaml

from services.common.clock import monotonic_s
from services.common.lifecycle import die_with_parent
from tideserve.cli.errors import SystemUnavailable

STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
TAIL_BYTES = 2000
PROBE_TIMEOUT_S = 10.0
PACKAGES = Path(__file__).resolve().parents[2]
"""The folder that contains the packages `tideserve` and `services`: a checkout or site-packages."""
OWN_PORTS = range(20_000, 32_000)
"""Ports below the range from which operating systems assign ephemeral ports."""


class ServerProcess:
    """A running server; `stop` ends all processes of its session."""

    def __init__(
        self, command: Sequence[str], log_path: Path, environment: Mapping[str, str]
    ) -> None:
        self._log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=log_path.parent,
                start_new_session=True,
                # Safe: no other thread of this process runs while a server is started.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509
            )

    @property
    def pid(self) -> int:
        """Process id of the server, not of its children."""
        return self._process.pid

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll `ready`; raises SystemUnavailable if the process ends or time runs out first."""
        deadline_s = monotonic_s() + timeout_s
        while not ready():
            if self._process.poll() is not None:
                raise SystemUnavailable(
                    f"the server exited with {self._process.returncode}: {self.tail()}"
                )
            if monotonic_s() > deadline_s:
                raise SystemUnavailable(
                    f"the server is not ready after {timeout_s:.0f} s: {self.tail()}"
                )
            try:
                self._process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue

    def tail(self) -> str:
        """The last non-empty lines of the log."""
        text = self._log_path.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "its log is empty"

    def freeze(self) -> None:
        """Suspend all processes of the session (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume suspended processes; no effect on running processes."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Send SIGTERM, and kill the session after STOP_TIMEOUT_S."""
        self.thaw()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class LocalCluster:
    """A cluster that `tideserve up` runs in a temporary folder, on a free port of this machine."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="tideserve-"))
        self.url = ""
        self._process: ServerProcess | None = None

    def start(self, options: Mapping[str, Any], timeout_s: float) -> None:
        """Start a cluster with `options` of `tideserve up`; return once /ready succeeds.

        Raises:
            SystemUnavailable: if the cluster is not ready in time; the folder with the logs is
            kept.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = self.folder / "cluster.yaml"
        config.write_text(yaml.safe_dump({**options, "port": port}), encoding="utf-8")
        command = up_command(config, self.folder / "cluster")
        self._process = ServerProcess(command, self.folder / "up.log", python_environment())
        try:
            self._process.wait_until(lambda: answers(f"{self.url}/ready"), timeout_s)
        except SystemUnavailable:
            self._process.stop()
            self._process = None
            raise

    def stop(self) -> None:
        """Stop the cluster and delete its folder; a cluster that did not start keeps its logs."""
        if self._process is not None:
            self._process.stop()
            self._process = None
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The process id of `tideserve up`."""
        assert self._process is not None
        return self._process.pid

    @property
    def state(self) -> Mapping[str, Any]:
        """The state file of `tideserve up`: `pids` by process name, `admin_url` and others."""
        state: Mapping[str, Any] = json.loads(
            (self.folder / "cluster" / "cluster.json").read_text()
        )
        return state

    @property
    def admin_url(self) -> str:
        """URL of the admin port: status and changes of groups."""
        return str(self.state["admin_url"])


def up_command(config: Path, folder: Path) -> list[str]:
    """The command that starts the cluster in the file `config`, with state and logs in `folder`."""
    up = [sys.executable, "-m", "tideserve.cli.commands.main", "up", "--with-parent"]
    return [*up, "--config", str(config), "--cluster-dir", str(folder)]


def python_environment() -> dict[str, str]:
    """The environment of this process, with the packages of this installation importable."""
    paths = [str(PACKAGES)]
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def fetch(url: str, api_key: str | None = None) -> bytes:
    """The body of a GET. Raises OSError, also for a response that is not HTTP."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers)
    try:
        with opener.open(request, timeout=PROBE_TIMEOUT_S) as response:
            body: bytes = response.read()
    except HTTPException as error:
        raise OSError(f"{url} did not send an HTTP response: {error!r}") from error
    return body


def answers(url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        fetch(url)
    except OSError:
        return False
    return True


def free_port() -> int:
    """An unused port outside the ephemeral range.

    The system could assign an ephemeral port to another server of the cluster first.
    """
    return first_free(sample(OWN_PORTS, len(OWN_PORTS)))


def first_free(ports: Iterable[int]) -> int:
    """The first unused port. Raises SystemUnavailable if all are used."""
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemUnavailable("no port is free; stop programs that use ports")
