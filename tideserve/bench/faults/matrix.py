"""The cells of the fault matrix: how large the group is, in which phase, to whom, and what happens.

Each phase is a failpoint of an engine (`services.common.failpoint`), so that a fault begins exactly
there, and not about when a clock says.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.common.failpoint import (
    CUT,
    CUT_ACTIVATIONS,
    CUT_BULK,
    KILL,
    KILL_PARENT,
    KILL_WORKER,
    NOTE,
    STOP,
    STOP_WORKER,
)
from tideserve.bench.errors import BenchError

ROLES = ("leader", "follower")
SIZES = (2, 3, 4)
QUICK_SIZES = (2,)


@dataclass(frozen=True, slots=True)
class FaultPhase:
    """Where a fault begins: `point` has a place for the role, `nth` is the hit that counts.

    merged: whether the groups merge before the load begins. change: what is asked for under load,
    "merge", "split", or "" for nothing. batch: so many streams are batch work, which yields to the
    others and is interrupted for them; it begins first. roles, sizes, faults: what makes cells of
    it; None: all.
    """

    point: str
    nth: int = 1
    merged: bool = False
    change: str = ""
    batch: int = 0
    roles: Sequence[str] = ROLES
    sizes: Sequence[int] = SIZES
    faults: Sequence[str] | None = None

    def has(self, size: int, role: str, fault: str) -> bool:
        """Whether there is such a cell."""
        fits = self.faults is None or fault in self.faults
        return fits and size in self.sizes and role in self.roles


PHASES: Mapping[str, FaultPhase] = {
    # Ready for the change, and nobody knows yet.
    "prepare": FaultPhase("engine.merge.ready.{}", change="merge"),
    # The change is committed, and the layers have not been switched.
    "committed": FaultPhase("engine.merge.switch.{}", change="merge"),
    # A piece of KV is about to be sent: its move is unfinished.
    "exchange": FaultPhase("engine.merge.kv_piece.{}", nth=2, change="merge"),
    # The group is settled; so many microbatches in all requests have begun.
    "steady": FaultPhase("engine.steady.microbatch.{}", nth=100, merged=True),
    # The first layer that comes back is about to be fetched.
    "restoring": FaultPhase("engine.split.fetch.{}", merged=True, change="split"),
    "splitting": FaultPhase("engine.split.switch.{}", merged=True, change="split"),
    "split_kv": FaultPhase("engine.split.kv_piece.{}", nth=2, merged=True, change="split"),
    # Batch requests rest at a worker that follows.
    "shelf": FaultPhase(
        "engine.shelf.microbatch.{}",
        nth=20,
        change="merge",
        batch=20,
        roles=ROLES[1:],
        faults=("kill-worker",),
    ),
    # An iteration of batch work was interrupted, and waits to go on.
    "suspended": FaultPhase(
        "engine.suspended.iteration.{}",
        batch=36,
        roles=ROLES[:1],
        sizes=SIZES[:1],
        faults=("kill-worker",),
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens: an action of the failpoint; `by_hand` is the bench's own, after a note.

    lasts_s: how long the fault itself goes on. seen: whether a connection closes, so that others
    learn of it at once. silence_max_s: how long a stream may then be without a token. roles: to
    whom it makes a difference.
    """

    action: str
    lasts_s: float = 0.0
    seen: bool = True
    silence_max_s: float = 3.0
    roles: Sequence[str] = ROLES
    by_hand: str = ""


def _by_hand(kind: str, lasts_s: float = 0.0) -> Fault:
    return Fault(NOTE, lasts_s, roles=ROLES[:1], by_hand=kind)


FAULTS: Mapping[str, Fault] = {
    "kill-worker": Fault(KILL_WORKER),
    "kill-engine": Fault(KILL),
    "kill-servicer": Fault(KILL_PARENT),
    # Longer than any silence that is tolerated on a lane (5 s), and than a lease (10 s), is 12 s. A
    # stream may be silent for the lease and 3 s; for 5 + 3 s where the servicer lives.
    "stop-3": Fault(STOP_WORKER, 3, seen=False, silence_max_s=13),
    "stop-12": Fault(STOP_WORKER, 12, seen=False, silence_max_s=13),
    "stop-70": Fault(STOP_WORKER, 70, seen=False, silence_max_s=13),
    "stop-engine-12": Fault(STOP, 12, seen=False, silence_max_s=8),
    "cut": Fault(CUT),
    "cut-activations": Fault(CUT_ACTIVATIONS),
    "cut-bulk": Fault(CUT_BULK),
    "etcd-kill": _by_hand("etcd-kill"),
    "etcd-stop-60": _by_hand("etcd-stop", 60),
    "etcd-compact": _by_hand("etcd-compact"),
    "memmgr-kill": _by_hand("memmgr-kill"),
    "gateway-kill": _by_hand("gateway-kill"),
}
QUICK_FAULTS = ("kill-worker",)


@dataclass(frozen=True, slots=True, order=True)
class FaultCell:
    """One cell: a fault in a phase of a group of `size` workers."""

    size: int
    phase: str
    role: str
    fault: str

    @property
    def name(self) -> str:
        """Its name, which is what `--cells` is compared with."""
        return f"{self.size}/{self.phase}/{self.role}/{self.fault}"

    @property
    def point(self) -> str:
        """The failpoint of its phase and role."""
        return PHASES[self.phase].point.format(self.role)

    @property
    def armed(self) -> str:
        """The failpoint as it stands in a configuration."""
        fault = FAULTS[self.fault]
        seconds = f":{fault.lasts_s:g}" if fault.action in (STOP, STOP_WORKER) else ""
        return f"{self.point}={fault.action}{seconds}@{PHASES[self.phase].nth}"


def fault_cells(quick: bool, pattern: str | None = None) -> list[FaultCell]:
    """All cells, or those in whose names `pattern` is found; small groups and kills come first.

    Raises:
        BenchError: if the pattern is none, or no cell has it.
    """
    cells = list(_all(QUICK_SIZES, QUICK_FAULTS) if quick else _all(SIZES, tuple(FAULTS)))
    if pattern is None:
        return cells
    try:
        found = [cell for cell in cells if re.search(pattern, cell.name)]
    except re.error as error:
        raise BenchError(f"'{pattern}' is no regular expression: {error}") from error
    if not found:
        all_names = [cell.name for cell in _all(SIZES, tuple(FAULTS))]
        exists = any(re.search(pattern, name) for name in all_names)
        more = "; there is such a one without --quick" if exists else ""
        raise BenchError(f"no cell is called '{pattern}'; one is {cells[0].name}{more}")
    return found


def _all(sizes: Sequence[int], faults: Sequence[str]) -> Iterator[FaultCell]:
    for size in sizes:
        for fault in faults:
            for phase in PHASES:
                for role in FAULTS[fault].roles:
                    if PHASES[phase].has(size, role, fault):
                        yield FaultCell(size, phase, role, fault)
