"""The cells of the fault matrix."""

from pathlib import Path

import pytest

from benchmarks.errors import BenchError
from benchmarks.faults.matrix import FAULTS, PHASES, ROLES, fault_cells
from services.common import failpoint


def test_a_quick_matrix_kills_both_workers_of_a_pair_in_every_phase() -> None:
    cells = fault_cells(quick=True)
    assert {cell.size for cell in cells} == {2}
    assert {cell.fault for cell in cells} == {"kill-worker"}
    pairs = [(cell.phase, cell.role) for cell in cells]
    phases = "prepare committed exchange steady restoring splitting split_kv"
    wanted = [(phase, role) for phase in phases.split() for role in ROLES]
    assert sorted(pairs) == sorted([*wanted, ("shelf", "follower"), ("suspended", "leader")])
    assert set(PHASES) == {*phases.split(), "shelf", "suspended"}


def test_the_full_matrix_has_every_fault_in_every_phase_of_groups_of_two_to_four() -> None:
    cells = fault_cells(quick=False)
    assert len(set(cells)) == len(cells)
    assert {cell.size for cell in cells} == {2, 3, 4}
    for size in (2, 3, 4):
        for fault, one in FAULTS.items():
            mine = {(c.phase, c.role) for c in cells if (c.size, c.fault) == (size, fault)}
            assert mine == {
                (phase, role)
                for phase, where in PHASES.items()
                for role in one.roles
                if where.has(size, role, fault)
            }
    assert not PHASES["shelf"].has(2, "leader", "kill-worker"), "who leads has no shelf"
    assert not PHASES["suspended"].has(3, "leader", "kill-worker")
    assert all(PHASES["steady"].has(size, role, "cut") for size in (2, 3, 4) for role in ROLES)
    assert set(fault_cells(quick=True)) <= set(cells)
    faults = "kill-engine kill-servicer stop-3 stop-12 stop-70 cut etcd-kill etcd-stop-60"
    assert set(faults.split()) | {"etcd-compact", "gateway-kill"} < set(FAULTS)


def test_every_cell_can_be_armed(tmp_path: Path) -> None:
    for cell in fault_cells(quick=False):
        failpoint.check([cell.armed], tmp_path / "hits")
        name, _, rest = cell.armed.partition("=")
        assert name == cell.point
        assert rest.startswith(FAULTS[cell.fault].action)


def test_cells_are_chosen_by_their_names() -> None:
    chosen = fault_cells(False, r"2/(steady|split_kv)/follower/stop-\d+$")
    assert {cell.name for cell in chosen} == {
        f"2/{phase}/follower/stop-{seconds}"
        for phase in ("steady", "split_kv")
        for seconds in (3, 12, 70)
    }
    with pytest.raises(
        BenchError, match=r"'stop-12'; one is .*; there is such a one without --quick"
    ):
        fault_cells(quick=True, pattern="stop-12")
    with pytest.raises(BenchError, match="no cell is called 'unsteady'"):
        fault_cells(False, "unsteady")
    with pytest.raises(BenchError, match="is no regular expression"):
        fault_cells(False, "(")
