"""Verdict on the effects of a fault on requests and cluster. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.load import STALL_S
from benchmarks.faults.matrix import FAULTS, PHASES, FaultCell
from benchmarks.faults.outcomes import (
    COMPLETED,
    KINDS,
    LOST,
    StreamOutcome,
    Undisturbed,
    ending_of,
    ending_problem,
)

STREAMS_MIN = 32
"""Minimum number of unfinished streams at the fault; with fewer, the cell does not count."""
BLOCKS_FREE_WITHIN_S = 15.0
"""Limit for freeing the blocks of requests whose gateway was lost."""
STABLE_WITHIN_S = 30.0
"""Limit from the end of the fault."""
PROBLEMS_MAX = 12
CUT_OFF = "cut_off"
"""Ending of a request whose gateway was killed: its client has, in effect, disconnected."""


@dataclass(slots=True)
class CellSeen:
    """Observations of a cell run.

    `hit_s`: when the failpoint was hit, on the monotonic clock; None if it never was. `wanted`:
    answers of an undisturbed run, by request. `stable_s`: seconds from the end of the fault until
    every survivor served and all records stayed settled, None if that never happened; `whole_s`:
    until restarted workers served as well. `blocks_free_s`: seconds from the end of all requests
    until no KV block was in use. `broken`: problems reported by audit and replays; `probed`:
    requests sent after the fault.
    """

    cell: FaultCell
    hit_s: float | None
    wanted: Sequence[Undisturbed]
    outcomes: Sequence[StreamOutcome]
    probed: Sequence[StreamOutcome] = ()
    stable_s: float | None = None
    whole_s: float | None = None
    blocks_free_s: float | None = None
    broken: Sequence[str] = ()
    violations: int = 0


@dataclass(slots=True)
class CellVerdict:
    """The verdict on a cell, which counts only if it was `hit` while enough streams were running.

    `logs`: folder of the kept logs if there were problems.
    """

    cell: FaultCell
    hit: bool
    streams: int
    requests: Mapping[str, int]
    violations: int
    silence_s: float
    stable_s: float | None
    problems: list[str] = field(default_factory=list)
    logs: Path | None = None

    def line(self) -> dict[str, Any]:
        """The verdict as a line of the file from which a matrix is resumed."""
        return {
            "size": self.cell.size,
            "phase": self.cell.phase,
            "role": self.cell.role,
            "fault": self.cell.fault,
            "hit": self.hit,
            "streams": self.streams,
            "requests": dict(self.requests),
            "violations": self.violations,
            "longest_silence_s": round(self.silence_s, 3),
            "stable_after_s": None if self.stable_s is None else round(self.stable_s, 3),
            "problems": self.problems,
        }


def judge_cell(seen: CellSeen) -> CellVerdict:
    """The verdict on the observations; `problems` has one sentence per problem."""
    gateway_lost = FAULTS[seen.cell.fault].kills_gateway
    hit_s = seen.hit_s
    left = [
        outcome for outcome in seen.outcomes if hit_s is not None and outcome.has_tokens_left(hit_s)
    ]
    counted: Counter[str] = Counter(sent=0, **dict.fromkeys(KINDS, 0))
    problems: list[str] = []
    for outcomes, when in ((seen.outcomes, ""), (seen.probed, " after the fault")):
        for number, (outcome, wanted) in enumerate(zip(outcomes, seen.wanted, strict=not when)):
            ending, name = ending_of(outcome, wanted), f"request {number}{when}"
            # The connection of the client died with its gateway, so a cut-off stream is no defect.
            if gateway_lost and not when and ending[0] == LOST and not outcome.finished:
                counted[CUT_OFF] += 1
                continue
            counted.update(("sent", ending[0]))
            if ending[0] != COMPLETED:
                problems.append(ending_problem(name, ending, outcome, len(wanted.token_ids)))
    # Batch work yields to online requests, so only the latter have a limit of silence.
    phase = PHASES[seen.cell.phase]
    online = () if phase.crowded else seen.outcomes[phase.batch :]
    silence_s = max(
        (
            outcome.silence_s(hit_s)
            for outcome in online
            if hit_s is not None and outcome.runs(hit_s)
        ),
        default=0.0,
    )
    if silence_s > (silence_max_s := FAULTS[seen.cell.fault].silence_max_s):
        problems.append(f"a stream was silent for {silence_s:.1f} s, more than {silence_max_s:g} s")
    problems += _cluster_problems(seen, gateway_lost) if hit_s is not None else []
    problems += seen.broken
    return CellVerdict(
        seen.cell,
        hit_s is not None and len(left) >= STREAMS_MIN,
        len(left),
        counted,
        seen.violations,
        silence_s,
        seen.stable_s,
        first_of(problems),
    )


def matrix_figures(
    lines: Iterable[Mapping[str, Any]], wanted: Sequence[FaultCell], lease_s: float
) -> dict[str, Any]:
    """The figures of a matrix from the lines of its cells; `wanted` are all cells of the matrix."""
    known = {(cell.size, cell.phase, cell.role, cell.fault) for cell in wanted}
    # A resumed file may have cells of another selection.
    done = {key: line for line in lines if (key := key_of(line)) in known}
    cells = [done[key] for key in sorted(done)]
    counts = (*("sent",), *KINDS)
    stable = [cell["stable_after_s"] for cell in cells if cell["stable_after_s"] is not None]
    return {
        "cells": sum(cell["hit"] for cell in cells),
        "cells_wanted": len(known),
        "cells_not_run": len(known) - len(cells),
        "by_cell": cells,
        "violations": sum(cell["violations"] for cell in cells),
        "requests": {name: sum(cell["requests"][name] for cell in cells) for name in counts},
        "longest_silence_s": {
            "seen": _longest(cells, seen=True),
            "unseen": _longest(cells, seen=False),
        },
        "client_stall_s": STALL_S,
        "lease_s": lease_s,
        "stable_after_s": max(stable, default=None),
    }


def matrix_problems(figures: Mapping[str, Any]) -> list[str]:
    """A sentence per cell that has problems or does not count."""
    problems = []
    for cell in figures["by_cell"]:
        name = "/".join(str(part) for part in key_of(cell))
        if not cell["hit"]:
            problems.append(
                f"{name} does not count: {cell['streams']} streams had tokens left at the fault"
            )
        problems += [f"{name}: {problem}" for problem in cell["problems"][:1]]
    return problems


def key_of(line: Mapping[str, Any]) -> tuple[int, str, str, str]:
    """The key of the cell of a line: size, phase, role, fault."""
    return int(line["size"]), str(line["phase"]), str(line["role"]), str(line["fault"])


def _cluster_problems(seen: CellSeen, gateway_lost: bool) -> list[str]:
    problems = []
    if seen.stable_s is None:
        problems.append("the cluster did not become stable again")
    elif seen.stable_s > STABLE_WITHIN_S:
        problems.append(f"the cluster was stable only {seen.stable_s:.0f} s after the fault")
    if seen.whole_s is None:
        problems.append("not all workers serve again")
    if seen.blocks_free_s is None:
        problems.append("blocks are in use although no request runs")
    elif gateway_lost and seen.blocks_free_s > BLOCKS_FREE_WITHIN_S:
        problems.append(f"blocks of a lost gateway were freed after {seen.blocks_free_s:.0f} s")
    return problems


def first_of(problems: Sequence[str]) -> list[str]:
    """The first problems, and the number of further problems."""
    more = len(problems) - PROBLEMS_MAX
    return [*problems[:PROBLEMS_MAX], *([f"and {more} more"] if more > 0 else [])]


def _longest(cells: Iterable[Mapping[str, Any]], seen: bool) -> float | None:
    """The longest silence of a stream under faults that peers do (`seen`) or do not see at once."""
    return max(
        (cell["longest_silence_s"] for cell in cells if FAULTS[cell["fault"]].seen is seen),
        default=None,
    )
