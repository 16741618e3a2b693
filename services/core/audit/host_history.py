"""History of an engine's host copies of KV, from its event log.

Part of an audit: it checks the invariants I12 and I13 (`audit.py`).
"""

from dataclasses import dataclass, field
from typing import Any

from services.core.audit.facts import HostCopied, HostHeld
from services.core.audit.record import Findings
from services.core.host.vocabulary import (
    BlocksRecalled,
    BlocksSaved,
    HostGrown,
    RecallBlocks,
    SaveBlocks,
)


@dataclass(slots=True)
class HostHistory:
    """The slots of an engine's host store, by the jobs in its log."""

    findings: Findings
    _jobs: dict[int, SaveBlocks | RecallBlocks] = field(default_factory=dict)
    _sums: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by job
    _saved: dict[int, tuple[bytes, int]] = field(default_factory=dict)  # slot → hash, checksum

    def take(self, worker_id: str, value: Any) -> None:
        """Note an entry of the log; entries of other parts are ignored."""
        match value:
            case SaveBlocks() | RecallBlocks():
                self._jobs[value.job] = value
            case HostCopied():
                self._sums[value.job] = value.sums
            case BlocksSaved():
                self._note_saved(value)
            case BlocksRecalled():
                self._check_recalled(worker_id, value)
            case HostGrown() if not value.slots:
                self._jobs.clear()
                self._saved.clear()
            case HostHeld():
                self._check_held(worker_id, value)

    def _note_saved(self, event: BlocksSaved) -> None:
        job, sums = self._jobs.pop(event.job, None), self._sums.pop(event.job, ())
        if not isinstance(job, SaveBlocks):
            return
        for block, whole, checksum in zip(job.blocks, event.intact, sums, strict=False):
            if whole:
                self._saved[block.slot] = block.block_hash, checksum
            else:
                self._saved.pop(block.slot, None)

    def _check_recalled(self, worker_id: str, event: BlocksRecalled) -> None:
        job, sums = self._jobs.pop(event.job, None), self._sums.pop(event.job, ())
        if not isinstance(job, RecallBlocks):
            return
        for block, whole, checksum in zip(job.blocks, event.intact, sums, strict=False):
            saved = self._saved.get(block.slot)
            if whole and saved is not None:
                self.findings.check(
                    "I12",
                    saved == (block.block_hash, checksum),
                    "{} recalled slot {} in job {} with other content than it had saved there",
                    *(worker_id, block.slot, event.job),
                )

    def _check_held(self, worker_id: str, fact: HostHeld) -> None:
        self.findings.check(
            "I13",
            fact.held + fact.filling + fact.empty == fact.slots,
            "{} has {} host slots, but {} copies, {} saves and {} empty slots",
            *(worker_id, fact.slots, fact.held, fact.filling, fact.empty),
        )
        self.findings.check(
            "I13",
            fact.sequences > 0 or fact.owed == 0,
            "{} keeps {} host copies for preempted requests, but has no requests",
            *(worker_id, fact.owed),
        )
