"""A whole cluster for a test, started by the `tideserve` command.

with Cluster(model_dir=tiny_model, workers=2, memory="64MiB") as cluster:
    openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from tests.support.exposition import samples
from tests.support.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 20.0
TAIL_BYTES = 4000
# Inherited by every process of a cluster, to find all of them.
MARK = "TIDESERVE_TEST_CLUSTER"

T = TypeVar("T")


class Cluster:
    """`tideserve up` in a process of its own, on a free port, in a temporary folder.

    On exit it is stopped, and no process of it may be left. If the test process is killed, the
    cluster drains by itself. `url` is the gateway's.
    """

    def __init__(
        self,
        model_dir: Path | None = None,
        workers: int = 2,
        memory: str = "64MiB",
        dtype: str = "float32",
        command: Sequence[str] = (sys.executable, "-m", "tideserve.cli.commands.main"),
        environment: dict[str, str] | None = None,
        subcommand: str = "up",
        tree: Path = REPOSITORY,
        **options: Any,
    ) -> None:
        """`options`: any key of the command's --config file, sections included.

        `model_dir` None serves the default model. `environment` is added to this process's. `tree`
        is the folder with the packages that run.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="tideserve-test-"))
        self.port = int(options.pop("port", 0)) or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = (*command, subcommand)
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._tree = tree
        self._api_key = options.get("api_key")
        self._options = {
            "port": self.port,
            "workers": workers,
            "memory": memory,
            "dtype": dtype,
            "ready_timeout": READY_TIMEOUT_S,
            **({"model": str(model_dir)} if model_dir else {}),
            **options,
            # Idle behaviour is tested separately.
            "worker": {"profile_when_idle": False, **options.get("worker", {})},
        }

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill_all()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            sys.stderr.write(self.tail())
        try:
            self.stop()
            left = self.wait_until_gone()
            assert not left, f"processes are left: {left}"
        finally:
            self.kill_all()
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Start without waiting; `__enter__` does both."""
        config = self.folder / "cluster.yaml"
        config.write_text(yaml.safe_dump(self._options))
        inherited = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self._tree), *([inherited] if inherited else [])]),
            "TMPDIR": str(self.folder),
            MARK: str(self.folder),
            **self._environment,
        }
        with self.output_path.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(*self._command, "--with-parent", "--config", str(config)),
                    *("--cluster-dir", str(self.folder / "cluster")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until the command prints that it is ready; bounded by the command's own deadline.

        Raises:
            AssertionError: if it ends or takes too long; shows the ends of all logs.
        """
        self.eventually(
            lambda: not self.running or "tideserve is ready" in self.output(),
            float(self._options["ready_timeout"]) + STOP_TIMEOUT_S,
        )
        assert self.running, f"the cluster did not start\n{self.tail()}"

    @property
    def running(self) -> bool:
        """Whether the command is still running."""
        return self._process is not None and self._process.poll() is None

    @property
    def up_pid(self) -> int:
        """Process id of the command itself."""
        assert self._process is not None
        return self._process.pid

    @property
    def output_path(self) -> Path:
        """The file with the command's output."""
        return self.folder / "output.log"

    @property
    def admin_url(self) -> str:
        """The gateway's admin port."""
        return str(self._state()["admin_url"])

    @property
    def grpc_target(self) -> str:
        """host:port of clients' gRPC."""
        return str(self._state()["grpc_target"])

    @property
    def etcd_url(self) -> str:
        """The etcd of the cluster."""
        return str(self._state()["etcd_url"])

    def output(self) -> str:
        """The output of the command so far."""
        return self.output_path.read_text() if self.output_path.exists() else ""

    def log(self, name: str) -> str:
        """The log of the process called `name` so far."""
        path = self.folder / "cluster" / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def pids(self) -> dict[str, int]:
        """Ids of running processes by name (etcd, gateway, scheduler, memmgr, worker-0, …)."""
        return dict(self._state()["pids"])

    def get(self, path: str, url: str | None = None) -> Any:
        """The JSON response of the gateway, or of the server at `url`; raises urllib's errors."""
        return json.loads(self._read((url or self.url) + path))

    def _read(self, url: str) -> bytes:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        request = urllib.request.Request(url, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as response:
            body: bytes = response.read()
        return body

    def metric(self, name: str) -> float:
        """The sum of a metric of the gateway over its labels; raises urllib's errors."""
        metrics = samples(self._read(f"{self.url}/metrics").decode())
        return sum(value for (sample, _), value in metrics.items() if sample == name)

    def status(self) -> dict[str, Any]:
        """The output of `tideserve status --json`, including the memory manager's answer.

        A single `get` may lack workers and groups.
        """

        def whole() -> dict[str, Any] | None:
            status: dict[str, Any] = self.get("/tideserve/v1/status", self.admin_url)
            return status if "errors" not in status else None

        # On a busy machine the memory manager may miss the short deadline of one status.
        return self.eventually(whole)

    def workers(self) -> list[dict[str, Any]]:
        """The workers' rows of the status; waits until all have registered."""

        def all_there() -> list[dict[str, Any]] | None:
            rows: list[dict[str, Any]] = self.status()["workers"]
            return rows if len(rows) == self._options["workers"] else None

        return self.eventually(all_there)

    def services(self) -> list[dict[str, Any]]:
        """The services' rows of the status; waits until all have reported their memory."""

        def all_told() -> list[dict[str, Any]] | None:
            rows: list[dict[str, Any]] = self.status()["services"]
            return rows if all(row["rss_bytes"] for row in rows) else None

        return self.eventually(all_told)

    def kv_blocks(self, key: str) -> int:
        """Sum of a number over all workers, for example of "kv_blocks_free"."""
        return sum(int(row[key]) for row in self.workers())

    def check_memory(self, budget_bytes: int) -> None:
        """Assert that each service is within its resident memory; `budget_bytes` is a worker's."""
        limits = {"gateway": 200_000_000, "scheduler": 120_000_000, "memmgr": 120_000_000}
        rows = self.services()
        assert len(rows) == len(limits) + self._options["workers"], rows
        for row in rows:
            limit = limits.get(row["name"], budget_bytes + 900_000_000)
            assert 0 < row["rss_bytes"] <= limit, row

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the process called `name`; returns its process id.

        `eventually(lambda: cluster.pids().get(name, pid) != pid)` waits for its successor.
        """
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    def wait_for_restart(self, name: str, old_pid: int) -> int:
        """Wait until `name` runs as another process than `old_pid`; returns its id."""
        return self.eventually(
            lambda: pid if (pid := self.pids().get(name, old_pid)) != old_pid else None
        )

    def eventually(self, check: Callable[[], T | None], deadline_s: float = 60.0) -> T:
        """Call `check` until it returns a true value; return that. An OSError counts as false.

        Raises:
            AssertionError: if it is still false after `deadline_s`; shows the ends of all logs.
        """
        end_s = time.monotonic() + deadline_s
        value: T | OSError | None = None
        while time.monotonic() < end_s:
            try:
                value = check()
                if value:
                    return value
            except OSError as error:
                value = error
            time.sleep(0.05)
        raise AssertionError(f"still {value!r} after {deadline_s} s\n{self.tail()}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask the command to stop and wait for it; returns its exit code. Killed if it hangs."""
        if self._process is None:
            return 0
        if self.running:
            self._process.send_signal(number)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            tail = self.tail()
            self.kill_all()
            raise AssertionError(f"the cluster does not stop\n{tail}") from None

    def wait(self, timeout_s: float = READY_TIMEOUT_S) -> int:
        """Wait for the command to end by itself; returns its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def processes(self) -> dict[int, str]:
        """Command lines of all processes of this cluster by process id, zombies left out."""
        mark = f"{MARK}={self.folder}".encode()
        processes = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    processes[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
            except OSError:
                continue
        return processes

    def wait_until_gone(self) -> dict[int, str]:
        """Wait until all processes have exited; returns those still running at the deadline."""
        end_s = time.monotonic() + GONE_TIMEOUT_S
        while (left := self.processes()) and time.monotonic() < end_s:
            time.sleep(0.05)
        return left

    def kill_all(self) -> None:
        """Kill all remaining processes of this cluster."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self._process is not None:
            self._process.wait()

    def tail(self) -> str:
        """The last lines of the output and of all logs."""
        paths = [self.output_path, *sorted((self.folder / "cluster" / "logs").glob("*.log"))]
        parts = []
        for path in paths:
            if path.exists():
                text = path.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
                parts.append(f"--- {path.name}\n{text}\n")
        return "".join(parts)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "cluster" / "cluster.json").read_text())
        return state
