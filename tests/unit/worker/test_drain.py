"""Whether other workers need a leaving one."""

from dataclasses import replace

import pytest

from services.core.report import EngineReport, Load
from services.worker.drain import is_needed
from services.worker.group_view import Place

IDLE = EngineReport(Load(0, 0, 10, 0, kv_blocks_total=10), epoch=4)
BUSY = replace(IDLE, load=Load(1, 0, 9, 0, kv_blocks_total=10))
ALONE = Place("g", 4, leads=True)
SHARED = Place("g", 4, leads=False, shared=True)


@pytest.mark.parametrize(
    ("report", "place", "active", "needed"),
    [
        (IDLE, None, 1, False),
        (IDLE, ALONE, 0, False),
        (BUSY, ALONE, 1, False),
        (IDLE, SHARED, 0, False),
        (IDLE, SHARED, 1, True),
        (BUSY, SHARED, 0, True),
        (replace(IDLE, epoch=3), ALONE, 0, True),
        (replace(IDLE, unsettled=True), ALONE, 0, True),
        (replace(IDLE, epoch=5), ALONE, 0, False),
    ],
)
def test_a_worker_stays_while_others_need_what_it_holds(
    report: EngineReport, place: Place | None, active: int, needed: bool
) -> None:
    assert is_needed(report, place, active) is needed
