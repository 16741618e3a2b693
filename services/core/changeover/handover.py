"""The old leader's side of a change: hands sequences to the new leaders.

Until the stream of a request has moved, its abort still arrives at the old leader, which forwards
it to the new leader. Batch work that yields is not handed over but parked: see `ParkedBatch`.
"""

from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as Row

from services.core.changeover.configuration import Configuration
from services.core.changeover.frames import Adopt, Adopted, FreeKv, RequestDropped
from services.core.changeover.member_context import MemberContext
from services.core.changeover.vocabulary import NoteMoved
from services.core.groups.layer_map import Stage
from services.core.planner.block_ledger import Follower
from services.core.planner.configuration_events import (
    SequenceForgotten,
    SequenceHeld,
    SequenceReset,
    SequenceResumed,
)
from services.core.planner.events import RequestAborted
from services.core.planner.sequence import Sequence


def assign_to_leaders(
    sequences: Iterable[Sequence], leaders: Iterable[str]
) -> list[tuple[Sequence, str]]:
    """Assign each sequence of an old leader to a new leader, so that blocks are balanced.

    Returns the assignments in hand-over order, most blocks first.
    """
    blocks = dict.fromkeys(leaders, 0)
    assigned = []
    # Greedy, largest first (LPT): each sequence goes to the leader with the fewest blocks so far.
    for sequence in sorted(sequences, key=lambda candidate: (-candidate.blocks, candidate.age)):
        leader = min(blocks, key=lambda worker_id: (blocks[worker_id], worker_id))
        blocks[leader] += max(1, sequence.blocks)
        assigned.append((sequence, leader))
    return assigned


def followers_of(
    new: Row[Stage], old: Row[Stage], joined: Mapping[str, tuple[int, int]]
) -> tuple[Follower, ...]:
    """The ledger's view of the stages of `new` behind its leader, whose last stages were `old`.

    `joined`: capacity and used blocks of each stage, as in `Joined`.
    """
    led = bool(old) and old[0].worker_id == new[0].worker_id
    # Only the leader of their last group has an account of their blocks to continue.
    before = {stage.worker_id: number for number, stage in enumerate(old)} if led else {}
    return tuple(
        Follower(*joined[stage.worker_id], before.get(stage.worker_id)) for stage in new[1:]
    )


def absent_stages(new: Iterable[Stage], old: Iterable[Stage]) -> frozenset[int]:
    """Indices of `new` stages where a sequence of `old` stages has no blocks yet."""
    holders = {stage.worker_id for stage in old}
    return frozenset(number for number, stage in enumerate(new) if stage.worker_id not in holders)


class ParkedBatch:
    """Batch sequences that stay at a worker while another worker leads.

    They released their KV when the configuration ended, so that only the KV of online requests
    moves. A worker that no longer leads keeps them waiting in its planner, which plans nothing, and
    resumes them when it leads again. If its group stays merged for `shelf_max_s`, they are handed
    to the leader like any sequence without KV; at once if the worker is draining.
    """

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._seq_ids: frozenset[str] = frozenset()  # of the parked sequences
        self._since_s: float | None = None  # when this worker stopped leading; None while it leads

    @property
    def due_s(self) -> float | None:
        """When the parked sequences go to the leader; None if there are none."""
        if self._since_s is None or self._context.planner.sequences.keys().isdisjoint(
            self._seq_ids
        ):
            return None
        return self._since_s + self._context.planner.config.shelf_max_s

    def park(self, new: Configuration) -> frozenset[str]:
        """Choose the sequences to park at the start of a change; they are not handed over."""
        context = self._context
        was, self._seq_ids = self._seq_ids, frozenset()
        if new.leads:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = context.now_s
        if any(context.worker_id in group.draining for group in new.groups):
            return self._seq_ids  # nothing: this worker will not lead again
        sequences = context.planner.sequences.values()
        parked = frozenset(each.seq_id for each in sequences if self._may_park(each))
        if new.leads:
            return parked & was  # they stay with this worker, which leads them from now on
        self._seq_ids = parked
        return parked

    def take_due(self) -> list[str]:
        """Remove and return the parked sequences once they are due, oldest first."""
        due_s, context = self.due_s, self._context
        if due_s is None or context.now_s < due_s:
            return []
        sequences = context.planner.sequences
        parked = [sequences[seq_id] for seq_id in self._seq_ids if seq_id in sequences]
        self._seq_ids = frozenset()
        return [each.seq_id for each in sorted(parked, key=lambda each: each.age)]

    def _may_park(self, sequence: Sequence) -> bool:
        """Whether the sequence is preemptible batch work without blocks."""
        yields = self._context.planner.sequence_table.precedence.batch_yields
        return yields and not sequence.request.service.online and not sequence.blocks


class Handover:
    """The sequences that this old leader hands over in the present configuration."""

    def __init__(self, context: MemberContext) -> None:
        self.pending: dict[str, str] = {}  # sequence → the leader that has yet to adopt it
        self.old_stages: tuple[Stage, ...] = ()  # of the last configuration: they hold the KV
        self.old_group = ""  # group id of the last configuration
        self.parked = ParkedBatch(context)  # batch sequences that are not handed over
        self._context = context
        self._aborted: set[str] = set()  # of `pending`
        self._moved: dict[str, str] = {}  # sequence → the leader that has adopted it
        self._assigned: dict[str, str] = {}  # sequence → its new leader, pending or adopted since
        self._freeing: dict[str, set[str]] = {}  # returned sequence → stages that still hold its KV

    @property
    def settled(self) -> bool:
        """Whether every request has a leader and no returned request waits for its KV's release."""
        return not self.pending and not self._freeing

    def settled_except(self, leader: str) -> bool:
        """As `settled`, apart from requests that wait for `leader` to adopt them."""
        return not self._freeing and all(to == leader for to in self.pending.values())

    def begin(self) -> None:
        """Start a change: the present configuration is the old configuration from now on."""
        for entries in (self.pending, self._moved, self._assigned, self._freeing):
            entries.clear()
        configuration = self._context.configuration
        self.old_stages = self._context.stages
        self.old_group = configuration.own.group_id if configuration is not None else ""

    def end_aborted(self) -> None:
        """End sequences that were aborted while pending, and whose new leader was lost."""
        for seq_id in sorted(self._aborted & self._context.planner.sequences.keys()):
            self._end(seq_id)
        self._aborted.clear()

    def distribute(self, new: Configuration) -> None:
        """Hand each sequence of this old leader to a new leader, balanced by blocks.

        Frees no blocks: `Joined` has already reported this worker's use to its new leader.
        """
        parked = self.parked.park(new)
        leaders = new.leaders_for({stage.worker_id for stage in self.old_stages})
        sequences = self._context.planner.sequences.values()
        for sequence in [each for each in sequences if each.seq_id in parked]:
            self._context.change(SequenceResumed(sequence.seq_id))  # waits without blocks
        moving = [each for each in sequences if each.seq_id not in parked]
        for sequence, leader in assign_to_leaders(moving, leaders):
            seq_id = sequence.seq_id
            # Hold it until its KV is where it will run; without KV there is nothing to wait for.
            if sequence.blocks:
                self._context.change(SequenceHeld(seq_id))
            else:
                self._context.change(SequenceResumed(seq_id))
            if leader != self._context.worker_id:
                self.send(seq_id, leader)

    def send(self, seq_id: str, leader: str) -> None:
        """Hand a sequence to `leader`; it is held here until `leader` has adopted it."""
        context = self._context
        context.change(SequenceHeld(seq_id))
        state = context.planner.export(seq_id)
        self.pending[seq_id] = self._assigned[seq_id] = leader
        context.send(
            leader,
            Adopt(
                sequence=state,
                origin=self.old_group,
                stages=self.old_stages if state.blocks else (),
                highest_block=context.highest_block((seq_id,)),
                age_s=context.now_s - state.arrival_s,
            ),
        )

    def hand_over_parked(self) -> None:
        """Hand the parked sequences to the leader once they are due (`ParkedBatch.due_s`)."""
        for seq_id in self.parked.take_due():
            self.send(seq_id, self._context.leader)

    def lose(self, leader: str, gone: Container[str]) -> list[str]:
        """Take back the sequences of a lost new leader, and have the old stages free their KV.

        Returns the sequences that it had not adopted, as far as is known here. They stay held until
        every stage has freed their KV (`note_freed`). Sequences that were aborted meanwhile end.
        `gone`: all members that nothing can be sent to.
        """
        back = []
        configuration = self._context.configuration
        assert configuration is not None
        # The stages of the lost leader's own group keep the KV: the leader may be alive and only
        # its connection to this worker lost.
        theirs = [group.workers for group in configuration.groups if leader in group.workers]
        stages = {stage.worker_id for stage in self.old_stages}.difference(*theirs)
        stages = {worker_id for worker_id in stages if worker_id not in gone}
        for seq_id in [seq_id for seq_id, to in self._assigned.items() if to == leader]:
            del self._assigned[seq_id]
            if self.pending.pop(seq_id, None) is not None:
                self._context.change(SequenceReset(seq_id))
                self._freeing[seq_id] = set(stages)
                back.append(seq_id)
            for worker_id in sorted(stages):
                self._context.send(worker_id, FreeKv(seq_id, whole_table=True))
        for seq_id in back:
            if seq_id in self._aborted:
                self._aborted.discard(seq_id)
                self._end(seq_id)
        return back

    def note_freed(self, worker_id: str, seq_id: str) -> bool:
        """Note that a stage freed a request's KV; returns whether the request may now resume."""
        left = self._freeing.get(seq_id)
        if left is None:
            return False
        left.discard(worker_id)
        if left:
            return False
        del self._freeing[seq_id]
        return seq_id in self._context.planner.sequences and seq_id not in self.pending

    def forget_stage(self, worker_id: str) -> list[str]:
        """Note that a stage is lost with its KV; returns the sequences that may now resume."""
        return [seq_id for seq_id in tuple(self._freeing) if self.note_freed(worker_id, seq_id)]

    def abort(self, seq_id: str) -> bool:
        """Forward an abort to the request's new leader; False if this worker leads it."""
        if seq_id in self.pending:
            # `Adopt` is already sent, and the new leader must not get the abort before it.
            self._aborted.add(seq_id)
            return True
        leader = self._moved.pop(seq_id, None)
        if leader is None or seq_id in self._context.planner.sequences:
            return False
        self._context.send(leader, RequestDropped(seq_id))
        return True

    def note_adopted(self, peer: str, frame: Adopted) -> None:
        """Forget a sequence that its new leader has adopted, and redirect its readers."""
        context, seq_id = self._context, frame.seq_id
        if self.pending.pop(seq_id, None) is None:
            return
        context.change(SequenceForgotten(seq_id))
        if seq_id in self._aborted:
            self._aborted.discard(seq_id)
            context.send(peer, RequestDropped(seq_id))
            return
        self._moved[seq_id] = peer
        assert context.configuration is not None
        group = next(each for each in context.configuration.groups if peer in each.workers)
        context.commands.append(NoteMoved(seq_id, peer, group, frame.next_index))

    def _end(self, seq_id: str) -> None:
        self._context.names.end(seq_id)
        self._context.change(RequestAborted(self._context.now_s, seq_id))
