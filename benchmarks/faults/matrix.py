"""The cells of the fault matrix: group size, phase, role of the victim, and fault.

Each phase is a failpoint of an engine (`services.common.failpoint`), so that a fault starts exactly
there instead of at an approximate time.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
SOURCE, TARGET = "source", "target"
SIZES = (2, 3, 4)
QUICK_SIZES = (2,)
MOVE = "move"
MOVED_AT_ONCE = 3
"""Requests of an order to move. The fault hits a later order, or it would hit all requests before
any of them runs at the target.
"""
SHIP_FAULTS = (
    *("kill-worker", "kill-engine", "kill-servicer", "stop-3", "stop-12", "cut", "cut-bulk"),
    *("gateway-kill", "scheduler-kill", "memmgr-kill"),
)
RECALL_FAULTS = ("kill-worker", "kill-engine", "stop-3", "stop-12", "stop-engine-12")
CALM_AT_ONCE = 8
CROWDED: Mapping[str, Any] = {
    "memory": "120MiB",
    "host_memory": "64MiB",
    "worker": {"save": "all", "save_from": 0.0},
}
"""Options of workers with KV for half of their streams, whose KV waits in host memory."""


@dataclass(frozen=True, slots=True)
class FaultPhase:
    """Where a fault starts: `point` is formatted with the role, `nth` is the hit that triggers.

    merged: whether the groups merge before the load starts. change: the change requested under
    load, "merge", "split", "move" (requests of a worker to another), or "" for none. batch: number
    of batch streams, which start first, yield to online requests and are interrupted for them.
    roles, sizes, faults: those with a cell in this phase; None: all. description: for the help.
    options: more options of the cluster. crowded: whether streams wait for KV memory, so that their
    silence has no limit; the undisturbed run then has `CALM_AT_ONCE` at a time and does not pass
    the failpoint. checks: the invariant that an audit must have checked.
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
    options: Mapping[str, Any] = field(default_factory=dict)
    crowded: bool = False
    checks: str = ""

    def has(self, size: int, fault: str) -> bool:
        """Whether cells of this size and fault exist."""
        return size in self.sizes and (self.faults is None or fault in self.faults)


def _shipping(description: str, point: str, nth: int) -> FaultPhase:
    """A phase of moves between single workers; a whole order has ended at hit `nth`."""
    return FaultPhase(
        description,
        point,
        nth,
        change=MOVE,
        roles=(SOURCE, TARGET),
        sizes=SIZES[:1],
        faults=SHIP_FAULTS,
        checks="I15",
    )


PHASES: Mapping[str, FaultPhase] = {
    "prepare": FaultPhase(
        "ready for a merge, not yet reported", "engine.merge.ready.{}", change="merge"
    ),
    "committed": FaultPhase(
        "the merge is committed, the layers are still the old ones",
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
        "the first layer is about to be restored for a split",
        "engine.split.fetch.{}",
        merged=True,
        change="split",
    ),
    "splitting": FaultPhase(
        "the split is committed, the layers are still the old ones",
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
        "batch requests are parked at a follower",
        "engine.shelf.microbatch.{}",
        nth=20,
        change="merge",
        batch=20,
        roles=ROLES[1:],
        faults=("kill-worker",),
    ),
    "suspended": FaultPhase(
        "an interrupted iteration of batch work is about to resume",
        "engine.suspended.iteration.{}",
        batch=36,
        roles=ROLES[:1],
        sizes=SIZES[:1],
        faults=("kill-worker",),
    ),
    "host_recall": FaultPhase(
        "KV of a preempted request is about to be copied back from host memory",
        "engine.host.recall.leader",
        nth=20,
        roles=ROLES[:1],
        sizes=SIZES[:1],
        faults=RECALL_FAULTS,
        options=CROWDED,
        crowded=True,
        checks="I12",
    ),
    "ship_parts": _shipping(
        "KV of a running request is about to be packed or stored", "engine.ship.part.{}", nth=150
    ),
    "ship_sealed": _shipping(
        "a request ends at its worker, and its last KV is on the way",
        "engine.ship.sealed.{}",
        nth=MOVED_AT_ONCE + 1,
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """The action of a failpoint; `by_hand` is an action of the benchmark while the process is held.

    lasts_s: duration of the fault itself. seen: whether a connection closes, so that peers see the
    fault at once. silence_max_s: how long a stream may then be without a token. any_role: whether
    it is the same whichever role passes the failpoint. description: for the help.
    """

    description: str
    action: str
    lasts_s: float = 0.0
    seen: bool = True
    silence_max_s: float = 3.0
    any_role: bool = False
    by_hand: str = ""

    @property
    def kills_gateway(self) -> bool:
        """Whether all requests end with their gateway."""
        return self.by_hand == "gateway-kill"


def _by_hand(description: str, kind: str, lasts_s: float = 0.0) -> Fault:
    return Fault(description, HOLD, lasts_s, any_role=True, by_hand=kind)


def _stopped(seconds: float) -> Fault:
    """A suspension: 12 s exceed both the silence tolerated on a lane (5 s) and a lease (10 s).

    A stream may be silent for the lease plus 3 s.
    """
    description = f"servicer and engine are suspended for {seconds:g} s"
    return Fault(description, STOP_WORKER, seconds, seen=False, silence_max_s=13)


FAULTS: Mapping[str, Fault] = {
    "kill-worker": Fault("kill -9 of servicer and engine", KILL_WORKER),
    "kill-engine": Fault("kill -9 of the engine", KILL),
    "kill-servicer": Fault("kill -9 of the servicer", KILL_PARENT),
    "stop-3": _stopped(3),
    "stop-12": _stopped(12),
    "stop-70": _stopped(70),
    # The servicer lives, so peers see the silent lane after 5 s; a stream may be silent 3 s more.
    "stop-engine-12": Fault(
        "the engine alone is suspended for 12 s", STOP, 12, seen=False, silence_max_s=8
    ),
    "cut": Fault("both lanes of a member close", CUT),
    "cut-activations": Fault("its activation lanes close", CUT_ACTIVATIONS),
    "cut-bulk": Fault("its bulk lanes close", CUT_BULK),
    "etcd-kill": _by_hand("kill -9 of etcd", "etcd-kill"),
    "etcd-stop-60": _by_hand("etcd is suspended for 60 s", "etcd-stop", 60),
    "etcd-compact": _by_hand("etcd compacts its history repeatedly", "etcd-compact", 3),
    "memmgr-kill": _by_hand("kill -9 of the memory manager", "memmgr-kill"),
    "scheduler-kill": _by_hand("kill -9 of the scheduler", "scheduler-kill"),
    "gateway-kill": _by_hand("kill -9 of the gateway", "gateway-kill"),
}
QUICK_FAULTS = ("kill-worker",)


@dataclass(frozen=True, slots=True, order=True)
class FaultCell:
    """A cell: a fault in a phase of a group of `size` workers."""

    size: int
    phase: str
    role: str
    fault: str

    @property
    def name(self) -> str:
        """The name, which `--cells` matches."""
        return f"{self.size}/{self.phase}/{self.role}/{self.fault}"

    @property
    def point(self) -> str:
        """The failpoint of its phase and role."""
        return PHASES[self.phase].point.format(self.role)

    @property
    def armed(self) -> str:
        """The failpoint as written in a configuration."""
        fault = FAULTS[self.fault]
        seconds = f":{fault.lasts_s:g}" if fault.action in (STOP, STOP_WORKER) else ""
        return f"{self.point}={fault.action}{seconds}@{PHASES[self.phase].nth}"


def fault_cells(quick: bool, pattern: str | None = None) -> list[FaultCell]:
    """All cells, or those whose name matches `pattern`; small groups and kills come first.

    Raises:
        BenchError: if the pattern is invalid or matches no cell.
    """
    cells = list(_all(QUICK_SIZES, QUICK_FAULTS) if quick else _all(SIZES, tuple(FAULTS)))
    if pattern is None:
        return cells
    try:
        matching = [cell for cell in cells if re.search(pattern, cell.name)]
    except re.error as error:
        raise BenchError(f"'{pattern}' is not a regular expression: {error}") from error
    if not matching:
        # Distinguish a typo from a cell of the full matrix.
        all_names = [cell.name for cell in _all(SIZES, tuple(FAULTS))]
        exists = any(re.search(pattern, name) for name in all_names)
        more = "; it exists without --quick" if exists else ""
        raise BenchError(f"no cell matches '{pattern}'; an example is {cells[0].name}{more}")
    return matching


def describe_cells() -> list[str]:
    """Help lines: the cells, and the meaning of their names."""
    every, quick = fault_cells(quick=False), fault_cells(quick=True)
    sizes, roles = (", ".join(map(str, names)) for names in (SIZES, (*ROLES, SOURCE, TARGET)))
    return [
        f"A cell is SIZE/PHASE/ROLE/FAULT, such as {every[0].name}. There are {len(every)} cells;"
        f" {len(quick)} with --quick, about a minute each.",
        f"SIZE: {sizes} workers in a group. ROLE: {roles}.",
        "PHASE:",
        *(f"  {name}: {phase.description}" for name, phase in PHASES.items()),
        "FAULT:",
        *(f"  {name}: {fault.description}" for name, fault in FAULTS.items()),
        "Examples:",
        "  tideserve bench faults --quick --json faults.json",
        "  tideserve bench faults --append cells.jsonl --minutes 60",
        "  tideserve bench faults --cells '2/exchange/.*/stop-12'",
        "  tideserve bench faults --minutes 30  (random faults and floods, and no cells)",
    ]


def _all(sizes: Sequence[int], faults: Sequence[str]) -> Iterator[FaultCell]:
    for size in sizes:
        for fault in faults:
            for name, phase in PHASES.items():
                for role in phase.roles[:1] if FAULTS[fault].any_role else phase.roles:
                    if phase.has(size, fault):
                        yield FaultCell(size, name, role, fault)
