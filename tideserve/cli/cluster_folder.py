"""The folder of a cluster: configurations, logs, data of etcd, and running processes.

lock           held while `tideserve up` runs
cluster.json   addresses, pid of up, pids by name, folders; removed by a clean stop
prometheus_targets.json  targets of the metrics of each process; removed by a clean stop
config/        a YAML file per process, readable by its owner only
logs/          a file per process, and a rotated predecessor of each
etcd/          data of the private etcd
batches/       database and files of batches, kept when the cluster stops
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil
import yaml

from tideserve.cli.cache import cache_root, create_cache
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError

# Logs above the first size rotate when a cluster starts, above the second while it runs.
LOG_BYTES_MAX = 10 * 2**20
RUNNING_LOG_BYTES_MAX = 50 * 2**20
RUN_PREFIX = "tideserve-"
# The path of a Unix socket has at most 107 bytes; names in a run folder need about 40.
RUN_PATH_BYTES_MAX = 60


def default_folder(port: int) -> Path:
    """The default folder of the cluster on `port`."""
    return cache_root() / "clusters" / str(port)


def running_urls() -> list[str]:
    """URLs of the gateways that run on this machine, from the default folders."""
    states = [ClusterFolder(path).read_state() for path in (cache_root() / "clusters").glob("*")]
    running = [state for state in states if state and psutil.pid_exists(int(state.get("pid", -1)))]
    return sorted(str(state["url"]) for state in running if state.get("url"))


class ClusterFolder:
    """The folder of a cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.configs = self.root / "config"
        self.logs = self.root / "logs"
        self.etcd_data = self.root / "etcd"
        self.batches = self.root / "batches"
        self.targets = self.root / "prometheus_targets.json"
        self._lock: IO[str] | None = None

    def claim(self) -> dict[str, Any] | None:
        """Create and lock the folder until `release` or the end of this process.

        Returns the state that a killed predecessor left behind, if any.

        Raises:
            CommandError: if another `tideserve up` holds the lock, or the folder is not writable.
        """
        try:
            if self.root.is_relative_to(cache_root()):
                create_cache(cache_root())
            for folder in (self.root, self.configs, self.logs, self.batches):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self.root / "lock").open("a")
        except OSError as error:
            raise CommandError(
                f"cannot write to the cluster folder {self.root}: {error.strerror}; choose"
                " another with --cluster-dir or TIDESERVE_CACHE",
                EXIT_UNUSABLE,
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            pid = (self.read_state() or {}).get("pid", "unknown")
            raise CommandError(
                f"a cluster already runs from {self.root} (process {pid}); stop it, or choose"
                " another --port",
                EXIT_UNUSABLE,
            ) from None
        self._lock = lock
        return self.read_state()

    def release(self) -> None:
        """Remove the state and unlock the folder after a clean stop."""
        # A folder that has become read-only must not keep the lock.
        with contextlib.suppress(OSError):
            for path in (self.root / "cluster.json", self.targets):
                path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read_state(self) -> dict[str, Any] | None:
        """Contents of cluster.json, None without the file."""
        try:
            state = json.loads((self.root / "cluster.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace cluster.json atomically."""
        _write_private(self.root / "cluster.json", json.dumps(state, indent=2) + "\n")

    def write_targets(self, text: str) -> None:
        """Write the file of Prometheus' targets."""
        _write_private(self.targets, text)

    def write_config(self, name: str, config: Mapping[str, Any]) -> Path:
        """Write the configuration of process `name` with mode 0600, because it may hold keys."""
        path = self.configs / f"{name}.yaml"
        _write_private(path, yaml.safe_dump(dict(config), sort_keys=False))
        return path

    @property
    def gateway_config(self) -> Path:
        """Configuration of the gateway, which also suits clients of the other services."""
        return self.configs / "gateway.yaml"

    def log_path(self, name: str) -> Path:
        """Path of the log of process `name`."""
        return self.logs / f"{name}.log"

    def rotate_logs(self) -> None:
        """Rotate large logs; call it before any process starts."""
        for path in self.logs.glob("*.log"):
            if path.stat().st_size > LOG_BYTES_MAX:
                path.replace(path.with_suffix(".log.1"))

    def cap_logs(self, bytes_max: int = RUNNING_LOG_BYTES_MAX) -> None:
        """Copy each log above `bytes_max` to its predecessor and truncate it.

        Processes keep their logs open in append mode and continue in the truncated file. Lines
        written between the copy and the truncation are lost.
        """
        for path in self.logs.glob("*.log"):
            # An operator may delete logs meanwhile; a failed rotation must not stop the cluster.
            with contextlib.suppress(OSError):
                if path.stat().st_size > bytes_max:
                    _copy_and_empty(path)

    def clear_etcd_data(self) -> None:
        """Delete the data of an earlier cluster, so that its leases need not expire first."""
        shutil.rmtree(self.etcd_data, ignore_errors=True)
        self.etcd_data.mkdir(mode=0o700)


def create_run_folder() -> Path:
    """Create a private temporary folder for sockets, whose paths must be short."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > RUN_PATH_BYTES_MAX - len(RUN_PREFIX) - 8:
        base = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=base))


def remove_run_folder(path: Path) -> None:
    """Remove a folder of `create_run_folder`; ignores any other path."""
    if path.name.startswith(RUN_PREFIX) and path.is_dir() and path.stat().st_uid == os.getuid():
        shutil.rmtree(path, ignore_errors=True)


def _copy_and_empty(path: Path) -> None:
    predecessor = path.with_suffix(".log.1")
    try:
        shutil.copyfile(path, predecessor)
    except OSError:
        # On a full disk, free space matters more than old lines.
        predecessor.unlink(missing_ok=True)
    os.truncate(path, 0)


def _write_private(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


REMEDY = (
    "pass the admin port of its gateway with --admin-url or TIDESERVE_ADMIN_URL, or the folder of a"
    " cluster on this machine with --cluster-dir"
)


def find_admin_url(given: str | None, url: str, cluster_dir: Path | None) -> str:
    """URL of the admin port: `given`, or from the local cluster whose gateway is at `url`.

    Raises:
        CommandError: if no such cluster runs here, or its admin port is off.
    """
    return given or admin_url_of(find_folder(url, cluster_dir))


def admin_url_of(folder: ClusterFolder) -> str:
    """URL of the admin port of the cluster in `folder`. Raises CommandError if the port is off."""
    admin_url = (folder.read_state() or {}).get("admin_url")
    if not admin_url:
        raise CommandError(
            f"the cluster in {folder.root} has no admin port; restart it with another"
            " 'admin_port' in section 'gateway' of its --config",
            EXIT_UNUSABLE,
        )
    return str(admin_url)


def find_folder(url: str, cluster_dir: Path | None) -> ClusterFolder:
    """The folder of the local cluster whose gateway is at `url`, or `cluster_dir` if set.

    Raises:
        CommandError: if no such cluster runs here.
    """
    if cluster_dir is None and _port_of(url) is None:
        raise CommandError(f"'{url}' has no port of a local cluster; {REMEDY}", EXIT_UNUSABLE)
    folder = local_folder(url) if cluster_dir is None else ClusterFolder(cluster_dir)
    if folder is None or folder.read_state() is None:
        place = f"on this machine at {url} by the cache folder {cache_root()} (TIDESERVE_CACHE)"
        if cluster_dir is not None:
            place = f"from {cluster_dir}"
        raise CommandError(f"no cluster runs {place}; {_others()}, or {REMEDY}", EXIT_UNUSABLE)
    return folder


def local_folder(url: str) -> ClusterFolder | None:
    """The folder of the local cluster whose gateway is at `url`, or None."""
    port = _port_of(url)
    if port is None:
        return None
    folder = ClusterFolder(default_folder(port))
    state = folder.read_state()
    if state is None or state.get("url") != _with_scheme(url).rstrip("/"):
        return None
    return folder


def _others() -> str:
    """The remedy: URLs of running clusters, or the command that starts a cluster."""
    urls = running_urls()
    if not urls:
        return "start a cluster with `tideserve up`"
    if len(urls) == 1:
        return f"a cluster runs at {urls[0]}: add --url {urls[0]}"
    return f"clusters run at {', '.join(urls)}: add --url with its address"


def _port_of(url: str) -> int | None:
    try:
        return urlsplit(_with_scheme(url)).port
    except ValueError:
        return None


def _with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"
