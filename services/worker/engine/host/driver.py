"""Drives the host copies of a planner: passes its commands to the copier, and results back.

Without memory the store stays at its size. If the copier's thread has failed, all copies are lost:
the planner notes it once, and serving goes on without them.
"""

import logging

from services.core.audit.facts import HostCopied
from services.core.host.vocabulary import (
    BlocksRecalled,
    BlocksSaved,
    CancelHostJob,
    HostEvent,
    HostGrown,
    HostLooked,
    RecallBlocks,
    SaveBlocks,
)
from services.core.planner.host_tier import HostTier
from services.core.report import HostReport
from services.worker.engine.host.copier import HostCopier, JobEnd, StepEnd
from services.worker.engine.host.lane import HostLane
from services.worker.engine.host.store import HostStore

ARRIVED_FAILPOINT = "engine.host.arrived.leader"

log = logging.getLogger(__name__)


class HostDriver:
    """Runs on the engine's thread. `tier` is the planner's part, with the index of `store`."""

    def __init__(
        self, store: HostStore, copier: HostCopier, lane: HostLane, tier: HostTier
    ) -> None:
        self._store = store
        self._copier = copier
        self._lane = lane
        self._tier = tier
        self._growing = False
        self._full = False  # the store cannot grow
        self._lost = False  # the copier's thread has failed
        self._copied: list[HostCopied] = []

    def start(self) -> None:
        """Start the copier's thread, and the store's first step."""
        self._copier.start()
        self._grow()

    def close(self) -> None:
        """Stop the copier."""
        self._copier.close()

    def keep_sums(self) -> None:
        """Return the checksums of copied blocks from `take_facts`."""
        self._copier.keeps_sums = True

    # --- commands

    def copy(self, command: SaveBlocks | RecallBlocks, now_s: float) -> HostEvent | None:
        """Begin a job; returns its end if it cannot begin."""
        if not self._lost:
            due_s = self._lane.occupy(len(command.blocks), now_s)
            if self._copier.submit(command, due_s):
                return None
        saves = isinstance(command, SaveBlocks)
        return _ended(JobEnd(command, (False,) * len(command.blocks) if saves else ()), now_s)

    def cancel(self, command: CancelHostJob) -> None:
        """End a job early."""
        self._copier.cancel(command.job)

    # --- events

    def fileno(self) -> int:
        """A descriptor that is readable while there are events."""
        return self._copier.fileno()

    @property
    def report(self) -> HostReport:
        """The store's memory, and what was copied."""
        counts, store = self._tier.counts, self._store
        return HostReport(
            host_bytes=store.backed_bytes,
            host_blocks_owed=self._tier.cache.owed,
            saved_blocks_total=counts.saved_blocks_total,
            save_bytes_total=counts.saved_blocks_total * store.slot_bytes,
            recall_jobs_total=counts.recalls_total,
            recalled_tokens_total=counts.recalled_tokens_total,
            host_hit_tokens_total=counts.hit_tokens_total,
            host_failures_total=counts.failures_total,
        )

    def events(self, now_s: float) -> list[HostEvent]:
        """The events since the last call."""
        if self._lost:
            return []
        made = (self._event(end, now_s) for end in self._copier.ends())
        events = [event for event in made if event is not None]
        if not self._copier.is_alive:
            log.error("host copies of KV are lost; this worker serves on without them")
            self._lost = True
            self._copier.ends()  # it may have rung since: clear `fileno` for good
            return [*events, HostGrown(now_s, 0)]
        if not self._copier.is_busy:
            self._lane.rest()
        if self._tier.cache.empty < self._store.step_slots // 2:
            self._grow()
        return events

    def take_facts(self) -> list[HostCopied]:
        """The checksums of the jobs whose ends the last `events` returned."""
        copied, self._copied = self._copied, []
        return copied

    def look(self, now_s: float) -> HostLooked:
        """The event with which the planner begins jobs."""
        return HostLooked(now_s, self._lane.free_s(now_s))

    def _event(self, end: JobEnd | StepEnd, now_s: float) -> HostEvent | None:
        if isinstance(end, JobEnd):
            if end.sums:
                self._copied.append(HostCopied(now_s, end.command.job, end.sums))
            return _ended(end, now_s)
        self._growing = False
        if not end.problem:
            return HostGrown(now_s, end.slots)
        self._full = True
        log.warning("%s", end.problem)
        return None

    def _grow(self) -> None:
        if not (self._growing or self._full) and self._store.slots < self._store.slots_max:
            self._growing = True
            self._copier.grow()


def _ended(end: JobEnd, now_s: float) -> HostEvent:
    kind = BlocksSaved if isinstance(end.command, SaveBlocks) else BlocksRecalled
    return kind(now_s, end.command.job, end.intact)


def wait_ms(due_s: float, now_s: float, idle_ms: int) -> int:
    """How long the engine may wait for frames until host copies are due at `due_s`."""
    return int(min(idle_ms, max(1.0, 1e3 * (due_s - now_s))))
