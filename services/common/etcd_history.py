"""Detects that etcd has lost writes: it was restored from a backup, or started without its data.

Such an etcd is *rolled back*: its revisions are lower than before, and will stand for other writes
than before. A restart, or a loss of quorum, loses nothing.
"""

import logging
from dataclasses import dataclass, replace

from services.common.etcd_calls import EtcdCalls

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """The newest known revision of an etcd cluster, and the number of its roll-backs so far."""

    cluster_id: int = 0  # 0 before the first response
    revision: int = 0
    rollbacks: int = 0


class EtcdHistory:
    """The position of the etcd at `url`, and whether its responses fit to it."""

    def __init__(self, url: str, calls: EtcdCalls) -> None:
        """`calls` counts the roll-backs for metrics."""
        self._url = url
        self._calls = calls
        self.position = Position()

    def note_response(self, before: Position, cluster_id: int, revision: int) -> int:
        """Note a linearizable response; returns the number of roll-backs before it.

        `before`: the position when the call began. Concurrent calls may be answered in any order,
        but no response has a lower revision than a response from before the call.
        """
        now = self.position
        lost = before.cluster_id not in (0, cluster_id) or revision < before.revision
        if before.rollbacks != now.rollbacks:
            # Another call has detected the roll-back; this response may still be from before it.
            return now.rollbacks if lost else before.rollbacks
        if not lost:
            self.position = Position(cluster_id, max(revision, now.revision), now.rollbacks)
            return now.rollbacks
        self.position = Position(cluster_id, revision, now.rollbacks)
        self._note_rollback(
            f"revision {revision} of cluster {cluster_id:x} follows revision {before.revision} of"
            f" cluster {before.cluster_id:x}"
        )
        return self.position.rollbacks

    def note_outdated(self, key: str, rollbacks: int) -> None:
        """Note that the record of `key` went back, as read after `rollbacks` roll-backs.

        The revision of the cluster may have overtaken the lost revisions meanwhile.
        """
        if rollbacks == self.position.rollbacks:
            self._note_rollback(f"{key} is older than before")

    def _note_rollback(self, evidence: str) -> None:
        self.position = replace(self.position, rollbacks=self.position.rollbacks + 1)
        self._calls.rollbacks += 1
        log.error(
            "etcd at %s has lost writes: %s; all records are read and written again",
            self._url,
            evidence,
        )
