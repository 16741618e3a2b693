"""Keeps the folder and the private etcd of a running cluster usable, also on a full disk."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.report import Report


class Upkeep:
    """Writes files that the cluster can do without, and cares for its logs and its private etcd."""

    def __init__(self, folder: ClusterFolder, report: Report) -> None:
        self._folder = folder
        self._report = report
        self._unwritten: dict[str, Callable[[], object]] = {}
        self._etcd_full = False
        # etcd may hang, and dead processes must be restarted meanwhile.
        self._relieving = ThreadPoolExecutor(1, "relieve-etcd")
        self._relief: Future[bool | None] | None = None

    def write(self, name: str, write: Callable[[], object]) -> None:
        """Call `write`, which writes the file `name`; after an OSError, `run` calls it again."""
        try:
            write()
        except OSError as error:
            if not self._unwritten:
                self._report.warn(
                    f"cannot write {name} in {self._folder.root} ({error.strerror}); the cluster"
                    " continues without it and without logs; free some disk space"
                )
            self._unwritten[name] = write
        else:
            if self._unwritten.pop(name, None) is not None and not self._unwritten:
                self._report.line(f"{self._folder.root} can be written again")

    def run(self, private_etcd_url: str | None) -> None:
        """Cap the logs, repeat failed writes, and free the space of an etcd that is full."""
        self._folder.cap_logs()
        for name, write in list(self._unwritten.items()):
            self.write(name, write)
        if private_etcd_url is not None:
            self._relieve_etcd(private_etcd_url)

    def close(self) -> None:
        """Wait for the last call to etcd, which fails at once after the end of etcd."""
        self._relieving.shutdown()

    def _relieve_etcd(self, url: str) -> None:
        # A slow import; etcd runs already.
        from tideserve.cli.etcd_process import relieve

        if self._relief is not None:
            if not self._relief.done():
                return
            self._report_etcd(self._relief.result())
        self._relief = self._relieving.submit(relieve, url)

    def _report_etcd(self, full: bool | None) -> None:
        if full is None:
            return
        was_full, self._etcd_full = self._etcd_full, full
        if self._etcd_full and not was_full:
            self._report.warn(
                "etcd has reached its quota and refuses writes (alarm NOSPACE): workers cannot"
                " register and groups cannot change; delete foreign keys from it"
            )
        elif was_full and not self._etcd_full:
            self._report.line("etcd accepts writes again")
