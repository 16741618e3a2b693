"""The old leader's part of a change: hands its sequences to the new leaders.

A sequence is *pending* from the `Adopt` frame until the new leader confirms with `Adopted`, and
*held* (not run) meanwhile. The token stream of an adopted sequence moves to the new leader only
after that, so the old leader forwards aborts. Preemptible batch sequences are *parked* instead of
handed over: see `ParkedBatch`.
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
    """Assign each sequence of an old leader to a new leader, balanced by number of blocks.

    Returns pairs of sequence and leader in hand-over order: most blocks first.
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
    """Ledger entries for the stages of `new`, without the leader's own.

    `old`: the leader's stages before the change. `joined`: capacity and used blocks of each stage,
    as in `Joined`.
    """
    same_leader = bool(old) and old[0].worker_id == new[0].worker_id
    # If this leader led these stages before, their ledger entries continue.
    before = {stage.worker_id: number for number, stage in enumerate(old)} if same_leader else {}
    return tuple(
        Follower(*joined[stage.worker_id], before.get(stage.worker_id)) for stage in new[1:]
    )


def absent_stages(new: Iterable[Stage], old: Iterable[Stage]) -> frozenset[int]:
    """Indices of the `new` stages where a sequence that ran on `old` stages has no blocks yet."""
    holders = {stage.worker_id for stage in old}
    return frozenset(number for number, stage in enumerate(new) if stage.worker_id not in holders)


class ParkedBatch:
    """Batch sequences that stay at a worker while another worker leads.

    Batch sequences release their KV at the end of a configuration, so that only KV of online
    sequences moves. A worker that no longer leads keeps them waiting in its planner, which then
    plans nothing, and resumes them when it leads again. If its group stays merged for
    `shelf_max_s`, they are handed to the leader like any sequence without KV. A worker that shuts
    down parks nothing.
    """

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._seq_ids: frozenset[str] = frozenset()  # parked sequences; some may have ended since
        self._since_s: float | None = None  # when this worker stopped leading; None while it leads

    @property
    def due_s(self) -> float | None:
        """When the parked sequences are handed to the leader; None if there are none."""
        if self._since_s is None or self._context.planner.sequences.keys().isdisjoint(
            self._seq_ids
        ):
            return None
        return self._since_s + self._context.planner.config.shelf_max_s

    def park(self, new: Configuration) -> frozenset[str]:
        """Update the parked sequences for `new`; returns those not to hand over in this change."""
        context = self._context
        previous, self._seq_ids = self._seq_ids, frozenset()
        if new.leads:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = context.now_s
        if any(context.worker_id in group.draining for group in new.groups):
            return self._seq_ids  # empty: this worker will not lead again
        sequences = context.planner.sequences.values()
        parked = frozenset(entry.seq_id for entry in sequences if self._may_park(entry))
        if new.leads:
            return parked & previous  # parked before: this worker keeps them and may run them now
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
        return [sequence.seq_id for sequence in sorted(parked, key=lambda entry: entry.age)]

    def _may_park(self, sequence: Sequence) -> bool:
        """Whether the sequence is preemptible batch work without blocks."""
        yields = self._context.planner.sequence_table.precedence.batch_yields
        return yields and not sequence.request.service.online and not sequence.blocks


class Handover:
    """The sequences that this member, as an old leader, hands over in a configuration."""

    def __init__(self, context: MemberContext) -> None:
        self.pending: dict[str, str] = {}  # sequence → the leader that has yet to adopt it
        self.old_stages: tuple[Stage, ...] = ()  # stages before the change: they hold the KV
        self.old_group = ""  # group id before the change
        self.parked = ParkedBatch(context)  # batch sequences that are not handed over
        self._context = context
        self._aborted: set[str] = set()  # pending sequences that their clients have aborted
        self._moved: dict[str, str] = {}  # sequence → the leader that has adopted it
        self._assigned: dict[str, str] = {}  # sequence → its new leader, pending or adopted since
        self._freeing: dict[str, set[str]] = {}  # returned sequence → stages that still hold its KV

    @property
    def settled(self) -> bool:
        """Whether no sequence is pending, and no returned sequence waits for release of its KV."""
        return not self.pending and not self._freeing

    def settled_except(self, leader: str) -> bool:
        """As `settled`, but sequences may wait for `leader` to adopt them."""
        return not self._freeing and all(target == leader for target in self.pending.values())

    def begin(self) -> None:
        """Start a change: save the present stages and group as the old ones."""
        for entries in (self.pending, self._moved, self._assigned, self._freeing):
            entries.clear()
        configuration = self._context.configuration
        self.old_stages = self._context.stages
        self.old_group = configuration.own.group_id if configuration is not None else ""

    def end_aborted(self) -> None:
        """End aborted sequences whose adoption was never confirmed."""
        for seq_id in sorted(self._aborted & self._context.planner.sequences.keys()):
            self._end(seq_id)
        self._aborted.clear()

    def distribute(self, new: Configuration) -> None:
        """Hand each sequence to a new leader, balanced by blocks; this worker may be one of them.

        Must not free blocks, because `Joined` has already reported the blocks in use here.
        """
        parked = self.parked.park(new)
        leaders = new.leaders_for({stage.worker_id for stage in self.old_stages})
        sequences = self._context.planner.sequences.values()
        for sequence in [entry for entry in sequences if entry.seq_id in parked]:
            self._context.apply(SequenceResumed(sequence.seq_id))  # waits without blocks
        moving = [entry for entry in sequences if entry.seq_id not in parked]
        for sequence, leader in assign_to_leaders(moving, leaders):
            seq_id = sequence.seq_id
            # Hold it until its KV is complete at the new stages. Without KV it can run at once.
            if sequence.blocks:
                self._context.apply(SequenceHeld(seq_id))
            else:
                self._context.apply(SequenceResumed(seq_id))
            if leader != self._context.worker_id:
                self.send(seq_id, leader)

    def send(self, seq_id: str, leader: str) -> None:
        """Hand a sequence to `leader`; it is held here until `leader` has adopted it."""
        context = self._context
        context.apply(SequenceHeld(seq_id))
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

    def lose(self, leader: str, unreachable: Container[str]) -> list[str]:
        """Take back the sequences of a lost new leader, and have the old stages free their KV.

        Returns the sequences whose adoption it had not confirmed. They stay held until every stage
        has freed their KV (`note_freed`); aborted sequences among them end. `unreachable`: all
        members to which no frame can be sent.
        """
        returned = []
        configuration = self._context.configuration
        assert configuration is not None
        # The stages of the lost leader's own group keep the KV: perhaps only the connection to this
        # worker is lost, and the leader runs the sequences.
        theirs = [group.workers for group in configuration.groups if leader in group.workers]
        stages = {stage.worker_id for stage in self.old_stages}.difference(*theirs)
        stages = {worker_id for worker_id in stages if worker_id not in unreachable}
        for seq_id in [seq_id for seq_id, target in self._assigned.items() if target == leader]:
            del self._assigned[seq_id]
            if self.pending.pop(seq_id, None) is not None:
                self._context.apply(SequenceReset(seq_id))
                self._freeing[seq_id] = set(stages)
                returned.append(seq_id)
            for worker_id in sorted(stages):
                self._context.send(worker_id, FreeKv(seq_id, whole_table=True))
        for seq_id in returned:
            if seq_id in self._aborted:
                self._aborted.discard(seq_id)
                self._end(seq_id)
        return returned

    def free_stale(self, seq_id: str, stages: frozenset[str]) -> None:
        """Hold a sequence without KV until `stages`, which may still store some, have freed it.

        Otherwise these stages would use the old blocks, which the ledger does not count for it.
        """
        if stages:
            self._context.apply(SequenceHeld(seq_id))
            self._freeing[seq_id] = set(stages)
            for worker_id in sorted(stages):
                self._context.send(worker_id, FreeKv(seq_id, whole_table=True))

    def note_freed(self, worker_id: str, seq_id: str) -> bool:
        """Record that a stage freed a sequence's KV; returns whether the sequence may resume."""
        remaining = self._freeing.get(seq_id)
        if remaining is None:
            return False
        remaining.discard(worker_id)
        if remaining:
            return False
        del self._freeing[seq_id]
        return seq_id in self._context.planner.sequences and seq_id not in self.pending

    def forget_stage(self, worker_id: str) -> list[str]:
        """Record that a stage is lost with its KV; returns the sequences that may resume."""
        return [seq_id for seq_id in tuple(self._freeing) if self.note_freed(worker_id, seq_id)]

    def abort(self, seq_id: str) -> bool:
        """Forward an abort to the sequence's new leader; False if no other worker leads it."""
        if seq_id in self.pending:
            # Forward the abort only after `Adopted`: it must reach the leader of the sequence.
            self._aborted.add(seq_id)
            return True
        leader = self._moved.pop(seq_id, None)
        if leader is None or seq_id in self._context.planner.sequences:
            return False
        self._context.send(leader, RequestDropped(seq_id))
        return True

    def note_adopted(self, peer: str, frame: Adopted) -> None:
        """Remove a sequence that `peer` has adopted, and redirect its readers to `peer`."""
        context, seq_id = self._context, frame.seq_id
        if self.pending.pop(seq_id, None) is None:
            return
        context.apply(SequenceForgotten(seq_id))
        if seq_id in self._aborted:
            self._aborted.discard(seq_id)
            context.send(peer, RequestDropped(seq_id))
            return
        self._moved[seq_id] = peer
        assert context.configuration is not None
        group = next(entry for entry in context.configuration.groups if peer in entry.workers)
        context.commands.append(NoteMoved(seq_id, peer, group, frame.next_index))

    def _end(self, seq_id: str) -> None:
        self._context.answering.end(seq_id)
        self._context.apply(RequestAborted(self._context.now_s, seq_id))
