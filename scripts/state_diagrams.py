"""Diagrams of the state machines in `services.core` that have a table of transitions."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from services.core.changeover import state as changeover
from services.core.groups import attempt, coordinator
from services.core.planner import sequence

INTRODUCTION = """\
# State machines

This page is made from the tables of transitions in `services/core` by `make gen`; `make check`
compares the two. A transition that is not in a table is a defect, and raises.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """A table: (from, to); `meanings` has a sentence for each state."""

    title: str
    file: str
    transitions: Collection[tuple[Enum, Enum]]
    initial: Enum
    meanings: Mapping[Enum, str]


MACHINES = (
    Machine(
        "A change of groups at the memory manager",
        "services/core/groups/coordinator.py",
        coordinator.TRANSITIONS,
        coordinator.ChangePhase.QUEUED,
        {
            coordinator.ChangePhase.QUEUED: "The change waits: as many run as may at once.",
            coordinator.ChangePhase.BLOCKED: "Another write is in its way; it will be tried again.",
            coordinator.ChangePhase.PREPARING: "An attempt runs: records are marked,"
            " members prepare, the commit is written.",
            coordinator.ChangePhase.COMMITTED: "Its members change over.",
            coordinator.ChangePhase.STABLE: "All members serve the new groups; KV still moves.",
            coordinator.ChangePhase.SETTLED: "Nothing of the change is left to do.",
            coordinator.ChangePhase.LEFT: "Its KV moves for too long; members finish it alone.",
            coordinator.ChangePhase.FAILED: "It was refused or aborted,"
            " or a member has not changed over in time.",
        },
    ),
    Machine(
        "An attempt to change groups",
        "services/core/groups/attempt.py",
        attempt.TRANSITIONS,
        attempt.AttemptPhase.MARKING,
        {
            attempt.AttemptPhase.MARKING: "The records of the groups get the attempt's id.",
            attempt.AttemptPhase.PREPARING: "The members get ready, and serve as before.",
            attempt.AttemptPhase.COMMITTING: "All members are ready, and the commit is written.",
            attempt.AttemptPhase.COMMITTED: "The new groups are in force.",
            attempt.AttemptPhase.ABORTED: "Everything is as it was; the marks are removed.",
        },
    ),
    Machine(
        "A member whose group changes",
        "services/core/changeover/state.py",
        changeover.TRANSITIONS,
        changeover.MemberPhase.SERVING,
        {
            changeover.MemberPhase.SERVING: "No change is under way here; another may be prepared.",
            changeover.MemberPhase.DRAINING: "A change is committed;"
            " microbatches of the present configuration come back.",
            changeover.MemberPhase.JOINING: "It leads the new group, and waits until every stage"
            " has told how many blocks it has.",
            changeover.MemberPhase.ADOPTING: "Sequences go from old leaders to new ones.",
            changeover.MemberPhase.MIGRATING: "KV travels to where its sequence runs.",
        },
    ),
    Machine(
        "A sequence in a worker",
        "services/core/planner/sequence.py",
        sequence.TRANSITIONS,
        sequence.Phase.WAITING,
        {
            sequence.Phase.WAITING: "It has no blocks and waits for some: new, or preempted.",
            sequence.Phase.RUNNING: "It has blocks and is planned.",
            sequence.Phase.HELD: "It has blocks, or is promised some, and is not planned:"
            " its KV is on the way.",
            sequence.Phase.ENDED: "It has ended or was aborted."
            " A sequence that another leader adopts leaves without this state.",
        },
    ),
)


def diagram(machine: Machine) -> str:
    """The machine as Mermaid: transitions in the order of their states, then the last states."""
    kind = type(machine.initial)
    order = {state: number for number, state in enumerate(kind)}
    pairs = sorted(machine.transitions, key=lambda pair: (order[pair[0]], order[pair[1]]))
    left = {source for source, _ in pairs}
    lines = [f"    [*] --> {machine.initial.name}"]
    lines += [f"    {source.name} --> {target.name}" for source, target in pairs]
    lines += [f"    {state.name} --> [*]" for state in kind if state not in left]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def page() -> str:
    """docs/states.md. Raises KeyError if a state has no meaning."""
    parts = [INTRODUCTION]
    for machine in MACHINES:
        rows = [f"| {state.name} | {machine.meanings[state]} |" for state in type(machine.initial)]
        parts.append(
            f"\n## {machine.title}\n\nThe table is in `{machine.file}`.\n\n{diagram(machine)}\n\n"
            + "\n".join(["| state | meaning |", "|---|---|", *rows])
            + "\n"
        )
    return "".join(parts)
