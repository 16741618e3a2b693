"""The folder of a cluster: configurations, logs, etcd's data, and which processes run.

lock           held while `tideserve up` runs
cluster.json   addresses, pid of up, pids by name, folders; gone after a clean stop
prometheus_targets.json  where each process has its metrics; gone after a clean stop
config/        one YAML file per process, readable by its owner only
logs/          one file per process, and one predecessor of each
etcd/          data of the private etcd
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

# A log above the first is set aside when a cluster starts, one above the second while it runs.
LOG_BYTES_MAX = 10 * 2**20
RUNNING_LOG_BYTES_MAX = 50 * 2**20
RUN_PREFIX = "tideserve-"
# A Unix socket's path ends at 107 bytes; the names below a run folder need about 40 of them.
RUN_PATH_BYTES_MAX = 60


def default_folder(port: int) -> Path:
    """Where the cluster on `port` has its folder unless it was told otherwise."""
    return cache_root() / "clusters" / str(port)


def running_urls() -> list[str]:
    """The gateways of the clusters that run on this machine, from their usual folders."""
    states = [ClusterFolder(path).read_state() for path in (cache_root() / "clusters").glob("*")]
    running = [state for state in states if state and psutil.pid_exists(int(state.get("pid", -1)))]
    return sorted(str(state["url"]) for state in running if state.get("url"))


class ClusterFolder:
    """One cluster's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.configs = self.root / "config"
        self.logs = self.root / "logs"
        self.etcd_data = self.root / "etcd"
        self.targets = self.root / "prometheus_targets.json"
        self._lock: IO[str] | None = None

    def claim(self) -> dict[str, Any] | None:
        """Create the folder and hold it until `release` or the end of this process.

        Returns the state that a predecessor which was killed left behind, if any.

        Raises:
            CommandError: if another `tideserve up` holds it, or it cannot be written to.
        """
        try:
            if self.root.is_relative_to(cache_root()):
                create_cache(cache_root())
            for folder in (self.root, self.configs, self.logs):
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
        """Give the folder back after a clean stop: nothing runs from it any more."""
        for path in (self.root / "cluster.json", self.targets):
            path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read_state(self) -> dict[str, Any] | None:
        """What cluster.json holds, None if there is none."""
        try:
            state = json.loads((self.root / "cluster.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace cluster.json; a reader sees the old one or the new one."""
        _write_private(self.root / "cluster.json", json.dumps(state, indent=2) + "\n")

    def write_targets(self, text: str) -> None:
        """Tell Prometheus where the metrics of the processes are."""
        _write_private(self.targets, text)

    def write_config(self, name: str, config: Mapping[str, Any]) -> Path:
        """Write the configuration of the process called `name`; it may hold a key."""
        path = self.configs / f"{name}.yaml"
        _write_private(path, yaml.safe_dump(dict(config), sort_keys=False))
        return path

    @property
    def gateway_config(self) -> Path:
        """The configuration of the gateway: what a client of the other services needs, too."""
        return self.configs / "gateway.yaml"

    def log_path(self, name: str) -> Path:
        """Log of the process called `name`."""
        return self.logs / f"{name}.log"

    def rotate_logs(self) -> None:
        """Set aside logs that have become large; called before any process is started."""
        for path in self.logs.glob("*.log"):
            if path.stat().st_size > LOG_BYTES_MAX:
                path.replace(path.with_suffix(".log.1"))

    def cap_logs(self, bytes_max: int = RUNNING_LOG_BYTES_MAX) -> None:
        """Copy each log above `bytes_max` to its predecessor's place and empty it.

        The processes hold their logs open in append mode, so they go on at the new beginning. What
        one writes between copy and emptying is lost.
        """
        for path in self.logs.glob("*.log"):
            # Somebody may tidy up beside us, and no log is worth the cluster.
            with contextlib.suppress(OSError):
                if path.stat().st_size > bytes_max:
                    _copy_and_empty(path)

    def clear_etcd_data(self) -> None:
        """Forget an earlier cluster's membership: its members are dead, their leases need time."""
        shutil.rmtree(self.etcd_data, ignore_errors=True)
        self.etcd_data.mkdir(mode=0o700)


def create_run_folder() -> Path:
    """A private temporary folder for sockets, with a path short enough for them."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > RUN_PATH_BYTES_MAX - len(RUN_PREFIX) - 8:
        base = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=base))


def remove_run_folder(path: Path) -> None:
    """Remove a folder that `create_run_folder` made; anything else is left alone."""
    if path.name.startswith(RUN_PREFIX) and path.is_dir() and path.stat().st_uid == os.getuid():
        shutil.rmtree(path, ignore_errors=True)


def _copy_and_empty(path: Path) -> None:
    predecessor = path.with_suffix(".log.1")
    try:
        shutil.copyfile(path, predecessor)
    except OSError:
        # The disk is full, say: then room matters more than old lines.
        predecessor.unlink(missing_ok=True)
    os.truncate(path, 0)


def _write_private(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


REMEDY = (
    "give the admin port of its gateway with --admin-url or TIDESERVE_ADMIN_URL, or the folder of a"
    " cluster on this machine with --cluster-dir"
)


def find_admin_url(given: str | None, url: str, cluster_dir: Path | None) -> str:
    """The admin port: `given`, or that of the cluster on this machine whose gateway is at `url`.

    Raises:
        CommandError: if no such cluster runs here, or it has no admin port.
    """
    return given or admin_url_of(find_folder(url, cluster_dir))


def admin_url_of(folder: ClusterFolder) -> str:
    """The admin port of the cluster that runs from a folder. Raises CommandError if it has none."""
    admin_url = (folder.read_state() or {}).get("admin_url")
    if not admin_url:
        raise CommandError(
            f"the cluster in {folder.root} has no admin port; start it again with another"
            " 'admin_port' in the section 'gateway' of its --config",
            EXIT_UNUSABLE,
        )
    return str(admin_url)


def find_folder(url: str, cluster_dir: Path | None) -> ClusterFolder:
    """The folder of the cluster on this machine whose gateway is at `url`, or `cluster_dir`.

    Raises:
        CommandError: if no such cluster runs here.
    """
    if cluster_dir is None and _port_of(url) is None:
        raise CommandError(f"'{url}' names no port of a cluster here; {REMEDY}", EXIT_UNUSABLE)
    folder = local_folder(url) if cluster_dir is None else ClusterFolder(cluster_dir)
    if folder is None or folder.read_state() is None:
        place = f"on this machine at {url} by the cache folder {cache_root()} (TIDESERVE_CACHE)"
        if cluster_dir is not None:
            place = f"from {cluster_dir}"
        raise CommandError(f"no cluster runs {place}; {_others()}, or {REMEDY}", EXIT_UNUSABLE)
    return folder


def local_folder(url: str) -> ClusterFolder | None:
    """The folder of the cluster on this machine whose gateway is at `url`, None if none is."""
    port = _port_of(url)
    if port is None:
        return None
    folder = ClusterFolder(default_folder(port))
    state = folder.read_state()
    if state is None or state.get("url") != _with_scheme(url).rstrip("/"):
        return None
    return folder


def _others() -> str:
    """The remedy: the URLs of the clusters that run, or how to start one."""
    urls = running_urls()
    if not urls:
        return "start one with `tideserve up`"
    if len(urls) == 1:
        return f"one runs at {urls[0]}: add --url {urls[0]}"
    return f"clusters run at {', '.join(urls)}: add --url with one of these"


def _port_of(url: str) -> int | None:
    try:
        return urlsplit(_with_scheme(url)).port
    except ValueError:
        return None


def _with_scheme(url: str) -> str:
    return url if "://" in url else f"http://{url}"
