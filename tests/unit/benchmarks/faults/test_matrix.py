"""The cells of the fault matrix."""

from pathlib import Path

import pytest

from benchmarks.errors import BenchError
from benchmarks.faults.matrix import FAULTS, MOVE, MOVED_AT_ONCE, PHASES, ROLES, fault_cells
from services.common import failpoint


def test_the_full_matrix_has_every_fault_in_every_phase_of_groups_of_two_to_four() -> None:
    cells = fault_cells(quick=False)
    assert len(set(cells)) == len(cells)
    wanted = {
        (size, fault, phase, role)
        for size in (2, 3, 4)
        for fault, faulted in FAULTS.items()
        for phase, where in PHASES.items()
        for role in where.roles[: 1 if faulted.any_role else None]
        if where.has(size, fault)
    }
    assert {(c.size, c.fault, c.phase, c.role) for c in cells} == wanted
    names = {cell.name for cell in cells}
    assert {f"{size}/steady/{role}/cut" for size in (2, 3, 4) for role in ROLES} <= names
    assert {"2/ship_parts/target/cut-bulk", "2/ship_sealed/source/gateway-kill"} <= names
    assert "2/host_recall/leader/stop-engine-12" in names
    quick = fault_cells(quick=True)
    assert set(quick) <= set(cells)
    kills = {(cell.phase, cell.role) for cell in quick if cell.fault == "kill-worker"}
    assert {phase for phase, _ in kills} == set(PHASES)
    assert all(("steady", role) in kills for role in ROLES)


def test_every_cell_can_be_armed(tmp_path: Path) -> None:
    for cell in fault_cells(quick=False):
        failpoint.check([cell.armed], tmp_path / "hits")
        name, _, rest = cell.armed.partition("=")
        assert name == cell.point
        assert rest.startswith(FAULTS[cell.fault].action)


def test_faults_of_moves_follow_an_order() -> None:
    phases = [phase for phase in PHASES.values() if phase.change == MOVE]
    assert phases and all(phase.nth > MOVED_AT_ONCE for phase in phases)


def test_cells_are_selected_by_name() -> None:
    chosen = fault_cells(False, r"2/(steady|split_kv)/follower/stop-\d+$")
    assert {cell.name for cell in chosen} == {
        f"2/{phase}/follower/stop-{seconds}"
        for phase in ("steady", "split_kv")
        for seconds in (3, 12, 70)
    }
    with pytest.raises(BenchError, match=r"'stop-12'; an example is .*; it exists without --quick"):
        fault_cells(quick=True, pattern="stop-12")
    with pytest.raises(BenchError, match="no cell matches 'unsteady'"):
        fault_cells(False, "unsteady")
    with pytest.raises(BenchError, match="is not a regular expression"):
        fault_cells(False, "(")
