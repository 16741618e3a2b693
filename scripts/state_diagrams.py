"""Diagrams of the state machines in `services.core` with a transition table."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from services.core.batches import vocabulary as batches
from services.core.changeover import state as changeover
from services.core.groups import attempt, coordinator
from services.core.planner import sequence

INTRODUCTION = """\
# State machines

`make gen` generates this page from the transition tables in `services/core`; `make check` compares
the two. A transition outside its table is a defect and raises.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """A state machine: its transitions (from, to), and a description of each state."""

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
            coordinator.ChangePhase.QUEUED: "The change waits for the limit of concurrent changes.",
            coordinator.ChangePhase.BLOCKED: "A conflicting write blocks it; it will be retried.",
            coordinator.ChangePhase.PREPARING: "An attempt runs: records are marked,"
            " members prepare, the commit is written.",
            coordinator.ChangePhase.COMMITTED: "Its members are changing over.",
            coordinator.ChangePhase.STABLE: "All members serve the new groups; KV still moves.",
            coordinator.ChangePhase.SETTLED: "The change is complete.",
            coordinator.ChangePhase.LEFT: "Its KV migration takes too long; members finish alone.",
            coordinator.ChangePhase.FAILED: "It was refused or aborted,"
            " or a member did not change over in time.",
        },
    ),
    Machine(
        "An attempt to change groups",
        "services/core/groups/attempt.py",
        attempt.TRANSITIONS,
        attempt.AttemptPhase.MARKING,
        {
            attempt.AttemptPhase.MARKING: "The attempt's id is written to the group records.",
            attempt.AttemptPhase.PREPARING: "The members prepare while serving as before.",
            attempt.AttemptPhase.COMMITTING: "All members are ready; the commit is being written.",
            attempt.AttemptPhase.COMMITTED: "The new groups are in force.",
            attempt.AttemptPhase.ABORTED: "The groups are unchanged; the marks are removed.",
        },
    ),
    Machine(
        "A member whose group changes",
        "services/core/changeover/state.py",
        changeover.TRANSITIONS,
        changeover.MemberPhase.SERVING,
        {
            changeover.MemberPhase.SERVING: "No change is in progress; a change may be prepared.",
            changeover.MemberPhase.DRAINING: "A change is committed;"
            " microbatches of the old configuration are draining.",
            changeover.MemberPhase.JOINING: "It leads the new group, and waits until every stage"
            " has reported its number of blocks.",
            changeover.MemberPhase.ADOPTING: "Sequences move from old leaders to new leaders.",
            changeover.MemberPhase.MIGRATING: "KV migrates to the stages of its sequence.",
        },
    ),
    Machine(
        "A sequence in a worker",
        "services/core/planner/sequence.py",
        sequence.TRANSITIONS,
        sequence.Phase.WAITING,
        {
            sequence.Phase.WAITING: "It waits for blocks: new, or preempted.",
            sequence.Phase.RUNNING: "It has blocks and is scheduled.",
            sequence.Phase.HELD: "It has allocated or reserved blocks and is not scheduled:"
            " its KV is in transfer.",
            sequence.Phase.ENDED: "It has ended or was aborted."
            " A sequence adopted by another leader is removed without this state.",
        },
    ),
    Machine(
        "A batch",
        "services/core/batches/vocabulary.py",
        batches.BATCH_TRANSITIONS,
        batches.BatchState.VALIDATING,
        {
            batches.BatchState.VALIDATING: "The leader reads the whole file; no line runs yet.",
            batches.BatchState.FAILED: "The file is invalid; no line has run.",
            batches.BatchState.IN_PROGRESS: "Lines run.",
            batches.BatchState.FINALIZING: "All lines have ended; the leader writes the files.",
            batches.BatchState.COMPLETED: "Its files have all lines.",
            batches.BatchState.CANCELLING: "Running lines are interrupted, then the files written.",
            batches.BatchState.CANCELLED: "Its files have the lines that ended before.",
            batches.BatchState.EXPIRED: "Its window ended first; its files have what had run.",
        },
    ),
    Machine(
        "A line of a batch",
        "services/core/batches/vocabulary.py",
        batches.LINE_TRANSITIONS,
        batches.LineState.PENDING,
        {
            batches.LineState.PENDING: "It waits in the database.",
            batches.LineState.RUNNING: "A gateway runs it as a request of class batch.",
            batches.LineState.DONE: "The model answered.",
            batches.LineState.FAILED: "The answer is an error that a repetition would not change.",
            batches.LineState.EXPIRED: "The batch's window ended first.",
            batches.LineState.CANCELLED: "The batch was cancelled first.",
        },
    ),
)


def diagram(machine: Machine) -> str:
    """The machine as Mermaid: transitions in the order of their states, then final states."""
    kind = type(machine.initial)
    order = {state: number for number, state in enumerate(kind)}
    pairs = sorted(machine.transitions, key=lambda pair: (order[pair[0]], order[pair[1]]))
    left = {source for source, _ in pairs}
    lines = [f"    [*] --> {machine.initial.name}"]
    lines += [f"    {source.name} --> {target.name}" for source, target in pairs]
    lines += [f"    {state.name} --> [*]" for state in kind if state not in left]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def page() -> str:
    """The text of docs/states.md. Raises KeyError if a state has no description."""
    parts = [INTRODUCTION]
    for machine in MACHINES:
        rows = [f"| {state.name} | {machine.meanings[state]} |" for state in type(machine.initial)]
        parts.append(
            f"\n## {machine.title}\n\nThe table is in `{machine.file}`.\n\n{diagram(machine)}\n\n"
            + "\n".join(["| state | meaning |", "|---|---|", *rows])
            + "\n"
        )
    return "".join(parts)
