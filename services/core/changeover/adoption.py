"""The new leader's part of a change: waits until its stages have joined, then adopts sequences.

Terms: a stage has *joined* once it has switched to the new configuration and sent `Joined`. An *old
leader* led a sequence before the change and hands it over with an `Adopt` frame. A sequence in
`Phase.HELD` may not run until its KV has moved to the present stages.
"""

from dataclasses import replace

from services.core.changeover.frames import (
    Adopt,
    Adopted,
    AllAdopted,
    FreeKv,
    Joined,
    MemberFrame,
)
from services.core.changeover.handover import Handover, absent_stages, followers_of
from services.core.changeover.leader_moves import LeaderMoves
from services.core.changeover.member_context import MemberContext
from services.core.changeover.vocabulary import NoteAdopted
from services.core.planner.configuration_events import SequenceAdopted, StagesConfigured
from services.core.planner.events import RequestAborted
from services.core.planner.sequence import Phase
from services.core.planner.sequence_ids import request_id_of


class Adoption:
    """Adopts sequences of old leaders, and defers frames until all stages have joined.

    Until then, the planner's ledger of free blocks lacks the stages' capacities.
    """

    def __init__(self, context: MemberContext, moves: LeaderMoves, handover: Handover) -> None:
        self._context = context
        self._moves = moves
        self._handover = handover
        # Reports of joined stages by worker id; None once all have joined, or if not leading.
        self._joined: dict[str, Joined] | None = None
        self._deferred: list[tuple[str, MemberFrame]] = []  # with their senders, in order
        self._handing_over: set[str] = set()  # members that may still send `Adopt`
        self._senders: dict[str, str] = {}  # old leader of each adopted sequence
        self._missed: frozenset[str] = frozenset()  # stages that may have KV of released sequences

    @property
    def waiting(self) -> bool:
        """Whether this leader waits for a stage to join."""
        return self._joined is not None

    @property
    def settled(self) -> bool:
        """Whether all stages have joined and no old leader can send another `Adopt`."""
        return self._joined is None and not self._handing_over

    def enter(self) -> None:
        """Reset for the configuration that this member has just switched to."""
        new = self._context.configuration
        assert new is not None
        self._deferred.clear()
        self._handing_over = set(new.members) - {new.worker_id} if new.leads else set()
        sequences = self._context.planner.sequences
        self._senders = {
            seq_id: peer for seq_id, peer in self._senders.items() if seq_id in sequences
        }
        self._joined = {} if new.leads else None
        self._missed = frozenset()

    def defer_if_joining(self, peer: str, frame: MemberFrame) -> bool:
        """Store a frame for `begin_when_joined`; returns False if it can be handled now."""
        if self._joined is None or isinstance(frame, Joined | AllAdopted):
            return False
        self._deferred.append((peer, frame))
        return True

    def note_joined(self, peer: str, frame: Joined) -> None:
        """Record that the stage of `peer` has joined."""
        if self._joined is not None:
            self._joined[peer] = frame

    def note_all_adopted(self, peer: str) -> None:
        """Record that `peer`, an old or lost leader, sends no further `Adopt`."""
        self._handing_over.discard(peer)

    def begin_when_joined(self) -> list[tuple[str, MemberFrame]]:
        """If all stages have joined, start the moves of KV; returns the deferred frames."""
        joined, stages = self._joined, self._context.stages
        if joined is None or any(stage.worker_id not in joined for stage in stages[1:]):
            return []
        self._joined = None
        context, handover = self._context, self._handover
        own = [s for s in context.planner.sequences.values() if s.seq_id not in handover.pending]
        counts = {worker_id: (frame.capacity, frame.used) for worker_id, frame in joined.items()}
        # Update the ledger first, because the moves below reserve blocks in it. Sequences in
        # `handover.pending` await their adoption by another leader.
        context.apply(StagesConfigured(followers_of(stages, handover.old_stages, counts)))
        self._missed = frozenset(name for name, frame in joined.items() if frame.missed)
        for sequence in own:
            if not sequence.blocks:
                handover.free_stale(sequence.seq_id, self._missed)
            if sequence.phase is Phase.HELD:
                seq_id = sequence.seq_id
                highest = context.highest_block((seq_id,))
                self._moves.add(seq_id, handover.old_group, handover.old_stages, highest)
        deferred, self._deferred = self._deferred, []
        return deferred

    def adopt(self, peer: str, adopt: Adopt) -> None:
        """Adopt a sequence and acknowledge it; a duplicate `Adopt` is only acknowledged."""
        context = self._context
        if not context.leads:
            return  # this worker led when the frame was sent; the group has changed again since
        # The planner's `request_id` is the sequence id; `request_id_of` returns the client's id.
        sequences, seq_id = context.planner.sequences, adopt.sequence.request.request_id
        fresh = seq_id not in sequences
        if fresh and not self._resolve_duplicate(peer, seq_id):
            self._adopt(adopt)
            self._senders[seq_id] = peer
            if not adopt.sequence.blocks and seq_id in sequences:
                self._handover.free_stale(seq_id, self._missed)
        context.send(peer, Adopted(seq_id, len(adopt.sequence.output_ids)))
        if not (fresh and adopt.sequence.blocks):
            return
        if seq_id in sequences:
            self._moves.add(seq_id, adopt.origin, adopt.stages, adopt.highest_block)
        else:
            # The planner refused the sequence as too large, or another sequence superseded it.
            for stage in adopt.stages:
                context.send(stage.worker_id, FreeKv(seq_id, whole_table=True))

    def _resolve_duplicate(self, peer: str, seq_id: str) -> bool:
        """Keep the newer of two sequences that answer the same request here, after a retry.

        Returns whether the sequence `seq_id`, which `peer` hands over, is superseded. If instead
        the present sequence is older, it is ended.
        """
        context = self._context
        current = context.answering.seq_id_of(request_id_of(seq_id))
        if current == seq_id or current not in context.planner.sequences:
            return False
        if self._senders.get(current) != peer:
            return True
        # The frames of a peer arrive in order, so its later sequence is the retry.
        context.answering.end(current)
        context.apply(RequestAborted(context.now_s, current))
        return False

    def _adopt(self, adopt: Adopt) -> None:
        context = self._context
        # Convert the age to this host's clock, since clocks of hosts cannot be compared.
        state = replace(adopt.sequence, arrival_s=context.now_s - adopt.age_s)
        context.answering.adopt(state.request.request_id)
        context.commands.append(NoteAdopted(state))
        context.apply(SequenceAdopted(state, absent_stages(context.stages, adopt.stages)))
