"""The old leader's side of a change: hands sequences to the new leaders, until these have them.

A request is aborted at the worker that led it before, until its stream has moved. That worker
passes the abort on, whether or not a gateway is there to do so.

Where batch work yields, it is not handed over with the rest: see `ParkedBatch`.
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
    """Give each sequence of an old leader to one of the new ones, so that blocks are balanced.

    Sequences with most blocks come first, in the order in which they are to be handed over.
    """
    dealt = dict.fromkeys(leaders, 0)
    found = []
    for sequence in sorted(sequences, key=lambda one: (-one.blocks, one.age)):
        leader = min(dealt, key=lambda one: (dealt[one], one))
        dealt[leader] += max(1, sequence.blocks)
        found.append((sequence, leader))
    return found


def followers_of(
    new: Row[Stage], old: Row[Stage], joined: Mapping[str, tuple[int, int]]
) -> tuple[Follower, ...]:
    """The stages after the first one of `new`, for its leader, whose last group was `old`.

    `joined`: blocks that each of them has, and how many of these are in use.
    """
    led = bool(old) and old[0].worker_id == new[0].worker_id
    # Only the leader of their last group has counted their blocks.
    before = {stage.worker_id: number for number, stage in enumerate(old)} if led else {}
    return tuple(
        Follower(*joined[stage.worker_id], before.get(stage.worker_id)) for stage in new[1:]
    )


def absent_stages(new: Iterable[Stage], old: Iterable[Stage]) -> frozenset[int]:
    """Stages of `new` where a sequence that `old` stages held has no blocks yet."""
    holders = {stage.worker_id for stage in old}
    return frozenset(number for number, stage in enumerate(new) if stage.worker_id not in holders)


class ParkedBatch:
    """Batch sequences that rest at a worker while another one leads.

    They gave their KV up when the configuration ended, so that only that of online requests moves.
    A worker that no longer leads keeps them: they wait in its planner, which plans nothing, and go
    on when it leads again. A group that stays merged for `shelf_max_s` gets them, as any sequence
    without KV; so it does at once if the worker is leaving.
    """

    def __init__(self, context: MemberContext) -> None:
        self._context = context
        self._names: frozenset[str] = frozenset()
        self._since_s: float | None = None

    @property
    def due_s(self) -> float | None:
        """When the leader gets what rests here; None if nothing does."""
        if self._since_s is None or self._context.planner.sequences.keys().isdisjoint(self._names):
            return None
        return self._since_s + self._context.planner.config.shelf_max_s

    def park(self, new: Configuration) -> frozenset[str]:
        """A change begins; returns the sequences that are not to be handed over with it."""
        context = self._context
        was, self._names = self._names, frozenset()
        if new.leads:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = context.now_s
        if any(context.worker_id in group.draining for group in new.groups):
            return self._names
        sequences = context.planner.sequences.values()
        rests = frozenset(one.request_id for one in sequences if self._may_park(one))
        if new.leads:
            return rests & was
        self._names = rests
        return rests

    def take_due(self) -> list[str]:
        """The sequences that have rested for too long, oldest first; they rest no more."""
        due_s, context = self.due_s, self._context
        if due_s is None or context.now_s < due_s:
            return []
        sequences = context.planner.sequences
        found = [sequences[name] for name in self._names if name in sequences]
        self._names = frozenset()
        return [one.request_id for one in sorted(found, key=lambda one: one.age)]

    def _may_park(self, sequence: Sequence) -> bool:
        """Whether it is batch work that yields, and has given its blocks back."""
        yields = self._context.planner.sequence_table.precedence.batch_yields
        return yields and not sequence.request.service.online and not sequence.blocks


class Handover:
    """The last hand-over. `pending`: sequence → the leader that has yet to adopt it.

    `old_stages` held the sequences until then, as the group `old_group`. `parked`: batch sequences
    that no leader gets for the time being.
    """

    def __init__(self, context: MemberContext) -> None:
        self.pending: dict[str, str] = {}
        self.old_stages: tuple[Stage, ...] = ()
        self.old_group = ""
        self.parked = ParkedBatch(context)
        self._context = context
        self._aborted: set[str] = set()  # of `pending`
        self._moved: dict[str, str] = {}  # sequence → the leader that has adopted it
        self._assigned: dict[str, str] = {}  # sequence → its new leader, pending or adopted since
        self._freeing: dict[str, set[str]] = {}  # sequence that came back → where its KV still is

    @property
    def settled(self) -> bool:
        """Whether every request has found its leader."""
        return not self.pending and not self._freeing

    def settled_except(self, leader: str) -> bool:
        """Whether every request has found its leader, except those that wait for `leader`."""
        return not self._freeing and all(to == leader for to in self.pending.values())

    def begin(self) -> None:
        """A change begins: the present configuration is the old one from here on."""
        for entries in (self.pending, self._moved, self._assigned, self._freeing):
            entries.clear()
        configuration = self._context.configuration
        self.old_stages = self._context.stages
        self.old_group = configuration.own.group_id if configuration is not None else ""

    def end_aborted(self) -> None:
        """End sequences that were aborted on the way to a leader that was lost meanwhile."""
        for name in sorted(self._aborted & self._context.planner.sequences.keys()):
            self._end(name)
        self._aborted.clear()

    def distribute(self, new: Configuration) -> None:
        """Give each sequence of this old leader to one of the new leaders, by blocks.

        No block is freed here: how many this worker uses has been told to its new leader.
        """
        rests = self.parked.park(new)
        leaders = new.leaders_for({stage.worker_id for stage in self.old_stages})
        sequences = self._context.planner.sequences.values()
        for sequence in [one for one in sequences if one.request_id in rests]:
            self._context.change(SequenceResumed(sequence.request_id))  # it waits, and has nothing
        moving = [one for one in sequences if one.request_id not in rests]
        for sequence, leader in assign_to_leaders(moving, leaders):
            name = sequence.request_id
            if sequence.blocks:
                self._context.change(SequenceHeld(name))
            else:
                self._context.change(SequenceResumed(name))  # nothing of it has to move
            if leader != self._context.worker_id:
                self.send(name, leader)

    def send(self, name: str, leader: str) -> None:
        """Hand a sequence to `leader`; it is held here until that has adopted it."""
        context = self._context
        context.change(SequenceHeld(name))
        state = context.planner.export(name)
        self.pending[name] = self._assigned[name] = leader
        context.send(
            leader,
            Adopt(
                sequence=state,
                origin=self.old_group,
                stages=self.old_stages if state.blocks else (),
                highest_block=context.highest_block((name,)),
                age_s=context.now_s - state.arrival_s,
            ),
        )

    def hand_over_parked(self) -> None:
        """The group has been merged for long: its leader gets the batch sequences that rest here.

        No effect before `ParkedBatch.due_s`.
        """
        for name in self.parked.take_due():
            self.send(name, self._context.leader)

    def lose(self, leader: str, gone: Container[str]) -> list[str]:
        """A new leader is gone: have the old stages free the KV of its sequences.

        Returns the sequences that come back: those that it had not adopted, as far as is known
        here. They are held until every stage has freed their KV (`note_freed`). `gone` are all
        members that nothing can be sent to. A sequence that was aborted meanwhile ends. The stages
        of that leader's own group keep what they have: it may live, and only the way to it be lost.
        """
        back = []
        configuration = self._context.configuration
        assert configuration is not None
        theirs = [group.workers for group in configuration.groups if leader in group.workers]
        stages = {stage.worker_id for stage in self.old_stages}.difference(*theirs)
        stages = {worker_id for worker_id in stages if worker_id not in gone}
        for name in [name for name, to in self._assigned.items() if to == leader]:
            del self._assigned[name]
            if self.pending.pop(name, None) is not None:
                self._context.change(SequenceReset(name))
                self._freeing[name] = set(stages)
                back.append(name)
            for worker_id in sorted(stages):
                self._context.send(worker_id, FreeKv(name, whole_table=True))
        for name in back:
            if name in self._aborted:
                self._aborted.discard(name)
                self._end(name)
        return back

    def note_freed(self, worker_id: str, name: str) -> bool:
        """A stage has freed a request's KV; returns whether the request came back and may go on."""
        left = self._freeing.get(name)
        if left is None:
            return False
        left.discard(worker_id)
        if left:
            return False
        del self._freeing[name]
        return name in self._context.planner.sequences and name not in self.pending

    def forget_stage(self, worker_id: str) -> list[str]:
        """A stage is gone, and with it its KV; returns the sequences that may go on now."""
        return [name for name in tuple(self._freeing) if self.note_freed(worker_id, name)]

    def abort(self, name: str) -> bool:
        """Pass an abort on to the leader that has the request now; False if that is this one."""
        if name in self.pending:
            # The sequence goes there in any case; the abort must not overtake it.
            self._aborted.add(name)
            return True
        leader = self._moved.pop(name, None)
        if leader is None or name in self._context.planner.sequences:
            return False
        self._context.send(leader, RequestDropped(name))
        return True

    def note_adopted(self, peer: str, frame: Adopted) -> None:
        """The new leader has the sequence: its readers are sent on."""
        context, name = self._context, frame.request_id
        if self.pending.pop(name, None) is None:
            return
        context.change(SequenceForgotten(name))
        if name in self._aborted:
            self._aborted.discard(name)
            context.send(peer, RequestDropped(name))
            return
        self._moved[name] = peer
        assert context.configuration is not None
        group = next(one for one in context.configuration.groups if peer in one.workers)
        context.commands.append(NoteMoved(name, peer, group, frame.next_index))

    def _end(self, name: str) -> None:
        self._context.names.end(name)
        self._context.change(RequestAborted(self._context.now_s, name))
