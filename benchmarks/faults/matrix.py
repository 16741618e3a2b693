"""The cells of the fault matrix: how large the group is, in which phase, to whom, and what happens.

Each phase is a failpoint of an engine (`services.common.failpoint`), so that a fault begins exactly
there, and not about when a clock says.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.errors import BenchError
from services.common.failpoint import (
    CUT,
    CUT_ACTIVATIONS,
    CUT_BULK,
    HOLD,
    KILL,
    KILL_PARENT,
    KILL_WORKER,
    STOP,
    STOP_WORKER,
)

ROLES = ("leader", "follower")
SIZES = (2, 3, 4)
QUICK_SIZES = (2,)


@dataclass(frozen=True, slots=True)
class FaultPhase:
    """Where a fault begins: `point` has a place for the role, `nth` is the hit that counts.

    merged: whether the groups merge before the load begins. change: what is asked for under load,
    "merge", "split", or "" for nothing. batch: so many streams are batch work, which yields to the
    others and is interrupted for them; it begins first. roles, sizes, faults: what makes cells of
    it; None: all. told: for people.
    """

    description: str
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
    "prepare": FaultPhase(
        "ready for a merge, and nobody knows yet", "engine.merge.ready.{}", change="merge"
    ),
    "committed": FaultPhase(
        "the merge is in the records, the layers are the old ones",
        "engine.merge.switch.{}",
        change="merge",
    ),
    "exchange": FaultPhase(
        "a piece of KV is about to be sent after a merge",
        "engine.merge.kv_piece.{}",
        nth=2,
        change="merge",
    ),
    "steady": FaultPhase(
        "a merged group serves, and all requests have begun",
        "engine.steady.microbatch.{}",
        nth=100,
        merged=True,
    ),
    "restoring": FaultPhase(
        "the first layer is about to come back for a split",
        "engine.split.fetch.{}",
        merged=True,
        change="split",
    ),
    "splitting": FaultPhase(
        "the split is in the records, the layers are the old ones",
        "engine.split.switch.{}",
        merged=True,
        change="split",
    ),
    "split_kv": FaultPhase(
        "a piece of KV is about to be sent after a split",
        "engine.split.kv_piece.{}",
        nth=2,
        merged=True,
        change="split",
    ),
    "shelf": FaultPhase(
        "batch requests rest at a follower",
        "engine.shelf.microbatch.{}",
        nth=20,
        change="merge",
        batch=20,
        roles=ROLES[1:],
        faults=("kill-worker",),
    ),
    "suspended": FaultPhase(
        "an interrupted iteration of batch work is to go on",
        "engine.suspended.iteration.{}",
        batch=36,
        roles=ROLES[:1],
        sizes=SIZES[:1],
        faults=("kill-worker",),
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens: an action of the failpoint; `by_hand` is the bench's own, while it is held.

    lasts_s: how long the fault itself goes on. seen: whether a connection closes, so that others
    learn of it at once. silence_max_s: how long a stream may then be without a token. roles: to
    whom it makes a difference. told: for people.
    """

    description: str
    action: str
    lasts_s: float = 0.0
    seen: bool = True
    silence_max_s: float = 3.0
    roles: Sequence[str] = ROLES
    by_hand: str = ""


def _by_hand(description: str, kind: str, lasts_s: float = 0.0) -> Fault:
    return Fault(description, HOLD, lasts_s, roles=ROLES[:1], by_hand=kind)


def _stopped(seconds: float) -> Fault:
    """Longer than any silence that is tolerated on a lane (5 s), and than a lease (10 s), is 12 s.

    A stream may be silent for the lease and 3 s.
    """
    description = f"servicer and engine stand still for {seconds:g} s"
    return Fault(description, STOP_WORKER, seconds, seen=False, silence_max_s=13)


FAULTS: Mapping[str, Fault] = {
    "kill-worker": Fault("kill -9 of servicer and engine", KILL_WORKER),
    "kill-engine": Fault("kill -9 of the engine", KILL),
    "kill-servicer": Fault("kill -9 of the servicer", KILL_PARENT),
    "stop-3": _stopped(3),
    "stop-12": _stopped(12),
    "stop-70": _stopped(70),
    # Since the servicer lives, a stream may be silent for 5 + 3 s.
    "stop-engine-12": Fault(
        "the engine alone stands still for 12 s", STOP, 12, seen=False, silence_max_s=8
    ),
    "cut": Fault("both lanes of a member end", CUT),
    "cut-activations": Fault("its activation lanes end", CUT_ACTIVATIONS),
    "cut-bulk": Fault("its bulk lanes end", CUT_BULK),
    "etcd-kill": _by_hand("kill -9 of etcd", "etcd-kill"),
    "etcd-stop-60": _by_hand("etcd stands still for 60 s", "etcd-stop", 60),
    "etcd-compact": _by_hand("etcd forgets its history again and again", "etcd-compact", 3),
    "memmgr-kill": _by_hand("kill -9 of the memory manager", "memmgr-kill"),
    "gateway-kill": _by_hand("kill -9 of the gateway", "gateway-kill"),
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
        matching = [cell for cell in cells if re.search(pattern, cell.name)]
    except re.error as error:
        raise BenchError(f"'{pattern}' is no regular expression: {error}") from error
    if not matching:
        all_names = [cell.name for cell in _all(SIZES, tuple(FAULTS))]
        exists = any(re.search(pattern, name) for name in all_names)
        more = "; there is such a one without --quick" if exists else ""
        raise BenchError(f"no cell is called '{pattern}'; one is {cells[0].name}{more}")
    return matching


def told_cells() -> list[str]:
    """Lines for people: what cells there are, and what their names mean."""
    every, quick = fault_cells(quick=False), fault_cells(quick=True)
    sizes, roles = (", ".join(map(str, names)) for names in (SIZES, ROLES))
    return [
        f"A cell is SIZE/PHASE/ROLE/FAULT, such as {every[0].name}. There are {len(every)};"
        f" {len(quick)} with --quick, of about a minute each.",
        f"SIZE: {sizes} workers in a group. ROLE: {roles}.",
        "PHASE:",
        *(f"  {name}: {phase.told}" for name, phase in PHASES.items()),
        "FAULT:",
        *(f"  {name}: {fault.told}" for name, fault in FAULTS.items()),
        "Examples:",
        "  tideserve bench faults --quick --json faults.json",
        "  tideserve bench faults --append cells.jsonl --minutes 60",
        "  tideserve bench faults --cells '2/exchange/.*/stop-12'",
        "  tideserve bench faults --minutes 30  (random faults and floods, and no cells)",
    ]


def _all(sizes: Sequence[int], faults: Sequence[str]) -> Iterator[FaultCell]:
    for size in sizes:
        for fault in faults:
            for phase in PHASES:
                for role in FAULTS[fault].roles:
                    if PHASES[phase].has(size, role, fault):
                        yield FaultCell(size, phase, role, fault)
