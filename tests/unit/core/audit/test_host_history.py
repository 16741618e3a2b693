"""Audits of host copies: recalled blocks equal saved ones, and no slot is lost."""

from typing import Any

import pytest

from services.core.audit.facts import HostCopied, HostHeld
from services.core.audit.host_history import HostHistory
from services.core.audit.record import Findings
from services.core.host.vocabulary import (
    BlocksRecalled,
    BlocksSaved,
    HostGrown,
    RecallBlocks,
    RecalledBlock,
    SaveBlocks,
    SavedBlock,
)

A, B = b"a" * 16, b"b" * 16
SAVED = [
    SaveBlocks(1, (SavedBlock(A, 0), SavedBlock(B, 1))),
    HostCopied(1.0, 1, (10, 20)),
    BlocksSaved(1.0, 1, (True, True)),
]


def recalled(block_hash: bytes, slot: int, checksum: int, intact: bool = True) -> list[Any]:
    return [
        RecallBlocks(2, "@recall.2", (RecalledBlock(block_hash, slot, 0),)),
        HostCopied(2.0, 2, (checksum,)),
        BlocksRecalled(2.0, 2, (intact,)),
    ]


def audited(entries: list[Any]) -> Findings:
    findings = Findings()
    history = HostHistory(findings)
    for entry in entries:
        history.take("w0", entry)
    return findings


def test_saved_blocks_can_be_recalled() -> None:
    findings = audited([*SAVED, *recalled(B, 1, 20)])
    assert findings.checks["I12"] == 1 and not findings.violations


@pytest.mark.parametrize(
    "entries", [recalled(A, 0, 20), recalled(B, 0, 10)], ids=["content", "hash"]
)
def test_recalls_of_wrong_content_or_blocks_are_detected(entries: list[Any]) -> None:
    (violation,) = audited([*SAVED, *entries]).violations
    assert violation.startswith("I12: w0 recalled slot 0 in job 2 with other content")


def test_copies_that_failed_or_were_lost_are_not_compared() -> None:
    assert not audited([*SAVED, *recalled(A, 0, 99, intact=False)]).violations
    assert not audited([*SAVED, HostGrown(1.5, 0), *recalled(A, 0, 99)]).violations


def test_slots_are_conserved_and_no_job_is_pending_at_rest() -> None:
    assert not audited([HostHeld(1.0, 8, 4, 2, 2, 3, 1), HostHeld(2.0, 8, 6, 0, 2, 0, 0)]).broken
    lost, owed = audited(
        [HostHeld(1.0, 8, 4, 2, 1, 0, 0), HostHeld(2.0, 8, 8, 0, 0, 3, 0)]
    ).violations
    assert lost == "I13: w0 has 8 host slots, but 4 copies, 2 saves and 1 empty slots"
    assert owed.startswith("I13: w0 keeps 3 host copies for preempted requests")
