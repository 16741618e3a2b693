"""The rules of a member's change-over, each with a patch that removes it.

Without a rule, its scenario in `changeover_witnesses.py` ends with wrong KV, leaked blocks, a
member that waits forever, or a client without its tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.core.changeover import adoption, frame_handlers, state
from services.core.changeover.adoption import Adoption
from services.core.changeover.capacity import MemberCapacity
from services.core.changeover.epoch_fence import EpochFence
from services.core.changeover.frames import CapacityKept, EpochAbandoned
from services.core.changeover.handover import Handover
from services.core.changeover.kv_exchange import ExchangeState
from services.core.changeover.leader_moves import LeaderMoves
from services.core.changeover.orphaned_kv import OrphanedKv
from services.core.changeover.preparation import Preparation, PreparationStep
from services.core.changeover.stage_kv import StageKv
from services.core.changeover.state import Changeover
from services.core.changeover.vocabulary import CancelTransfer, PeersLost, ReleaseDeparted
from services.core.planner.configuration_events import SequenceResumed
from services.core.planner.events import RequestAborted

Removal = Callable[[pytest.MonkeyPatch], None]


def _put(owner: Any, name: str, value: Any) -> Removal:
    """A removal that replaces an attribute of `owner`."""
    return lambda patch: patch.setattr(owner, name, value)


def _drains_at_once(self: Changeover, _new: object, _now_s: float) -> bool:
    return True


def _follower_leaves_at_once(patch: pytest.MonkeyPatch) -> None:
    waits = Changeover._is_drained

    def leaves(self: Changeover, new: Any, now_s: float) -> bool:
        return waits(self, new, now_s) if self.leads else self._handover.settled

    patch.setattr(Changeover, "_is_drained", leaves)


def _resumes_at_once(patch: pytest.MonkeyPatch) -> None:
    add = LeaderMoves.add

    def resume(self: LeaderMoves, request_id: str, *rest: Any) -> None:
        add(self, request_id, *rest)
        sequence = self._context.planner.sequences[request_id]
        if not sequence.absent:
            self._context.apply(SequenceResumed(request_id))

    patch.setattr(LeaderMoves, "add", resume)


def _aborts_while_joining(self: Changeover, name: str) -> None:
    self._context.answering.end(name)
    if not self._handover.abort(name):
        self._context.apply(RequestAborted(self._context.now_s, name))


def _begins_unsettled(patch: pytest.MonkeyPatch) -> None:
    advance = Preparation.advance
    patch.setattr(Preparation, "advance", lambda self, _settled: advance(self, True))


def _keeps_released_names(patch: pytest.MonkeyPatch) -> None:
    free_and_forward = MemberCapacity.free_and_forward
    patch.setattr(
        MemberCapacity,
        "free_and_forward",
        lambda self, frame: free_and_forward(self, replace(frame, released=())),
    )


def _releases_departed_at_once(self: StageKv, freed: Any) -> None:
    self._releases.append(freed)
    self._context.commands.append(ReleaseDeparted(0))


def _tells_no_credit(patch: pytest.MonkeyPatch) -> None:
    tell = StageKv._report_freed
    patch.setattr(
        StageKv,
        "_report_freed",
        lambda self, freed, grown: tell(self, freed._replace(blocks=0), grown),
    )


def _cancels_nothing(patch: pytest.MonkeyPatch) -> None:
    free = StageKv.free

    def keep_on(self: StageKv, peer: str, frame: Any) -> None:
        free(self, peer, frame)
        commands = self._context.commands
        commands[:] = [command for command in commands if not isinstance(command, CancelTransfer)]

    patch.setattr(StageKv, "free", keep_on)


def _counts_no_joined_use(patch: pytest.MonkeyPatch) -> None:
    count = adoption.followers_of

    def uncounted(*stages: Any) -> Any:
        return tuple(replace(follower, used_blocks=0) for follower in count(*stages))

    patch.setattr(adoption, "followers_of", uncounted)


def _keeps_what_was_prepared(self: Preparation, _new: object) -> None:
    self._current = None


def _shrinks_without_moving(self: Preparation, now: Any) -> None:
    if now.step is PreparationStep.RELOCATION:
        self._shrink(now)


def _answers_at_once(self: MemberCapacity) -> None:
    for peer, asked in list(self._awaiting_kept.items()):
        del self._awaiting_kept[peer]
        self._context.send_along(CapacityKept(peer, asked.attempt, self._kv.take_released()))


def _limits_unasked(patch: pytest.MonkeyPatch) -> None:
    measured = Preparation.note_measured

    def limit(self: Preparation, event: Any) -> None:
        measured(self, event)
        if self._current is not None:
            self.note_capacity_kept(self._current.attempt)

    patch.setattr(Preparation, "note_measured", limit)


def _leaves_when_its_leader_does(patch: pytest.MonkeyPatch) -> None:
    waits = Changeover._is_drained

    def leaves(self: Changeover, new: Any, now_s: float) -> bool:
        return waits(self, new, now_s) or (not self.leads and self._frames.drained)

    patch.setattr(Changeover, "_is_drained", leaves)


def _forgets_lost(patch: pytest.MonkeyPatch) -> None:
    note = state._EVENTS[PeersLost]

    def forget(self: Changeover, event: Any) -> None:
        if not self._adoption.waiting:
            note(self, event)

    patch.setitem(state._EVENTS, PeersLost, forget)


def _ignores_passed(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(frame_handlers._FRAMES, EpochAbandoned, lambda *_: None)


def _adopts_again(patch: pytest.MonkeyPatch) -> None:
    adopt = Adoption.adopt

    def again(self: Adoption, peer: str, frame: Any) -> None:
        if frame.sequence.request.request_id in self._context.planner.sequences:
            self._adopt(frame)
        adopt(self, peer, frame)

    patch.setattr(Adoption, "adopt", again)


def _aborts_only_what_is_pending(self: Handover, name: str) -> bool:
    if name in self.pending:
        self._aborted.add(name)
    return name in self.pending


def _puts_the_first_first(patch: pytest.MonkeyPatch) -> None:
    superseded = Adoption._resolve_duplicate
    patch.setattr(Adoption, "_resolve_duplicate", lambda self, _, name: superseded(self, "", name))


RULES: dict[str, Removal] = {
    "frames of other epochs have no effect": _put(EpochFence, "admits", lambda *_: True),
    "frames wait until all stages have joined": _put(
        Adoption, "defer_if_joining", lambda *_: False
    ),
    "a configuration is left when it is drained": _put(Changeover, "_is_drained", _drains_at_once),
    "a stage leaves after its leader": _follower_leaves_at_once,
    "a sequence is held until its KV is whole": _resumes_at_once,
    "a superseded sequence is not adopted": _put(Adoption, "_resolve_duplicate", lambda *_: False),
    "transfers to released requests are refused": _put(StageKv, "forget", lambda *_: None),
    "unclaimed KV keeps a member unsettled": _put(
        StageKv, "has_unclaimed", property(lambda _: False)
    ),
    "a preparation begins when all is settled": _begins_unsettled,
    "names of released requests go before blocks": _keeps_released_names,
    "an abort waits while stages join": _put(Changeover, "_abort", _aborts_while_joining),
    "departed KV stays until it is freed": _put(StageKv, "_release", _releases_departed_at_once),
    "freed blocks of other leaders are credited": _tells_no_credit,
    "a transfer of freed KV is cancelled": _cancels_nothing,
    "a new leader counts used blocks": _counts_no_joined_use,
    "a preparation for another change is aborted": _put(
        Preparation, "end", _keeps_what_was_prepared
    ),
    "blocks move below the limit first": _put(Preparation, "_advance", _shrinks_without_moving),
    "a stage shrinks when few enough are used": _put(
        MemberCapacity, "answer_waiting", _answers_at_once
    ),
    "a stage shrinks when its leader agrees": _limits_unasked,
    "a move starts when there is room": _put(ExchangeState, "_fits", lambda *_: True),
    "KV that no leader has is released": _put(OrphanedKv, "release", lambda *_: None),
    "the later of two copies from a member is adopted": _puts_the_first_first,
    "sequences dealt to a lost leader are freed": _put(Handover, "lose", lambda *_: []),
    "KV of a lost source is abandoned": _put(LeaderMoves, "lose", lambda *_: None),
    "a leader waits for all that may hand over": _put(
        Adoption, "settled", property(lambda self: self._joined is None)
    ),
    "a member that skips a change announces it": _ignores_passed,
    "a member that may have missed a change announces it": _put(
        Preparation, "ready_before", lambda *_: None
    ),
    "a sequence is adopted once": _adopts_again,
    "an abort follows a sequence that has moved": _put(
        Handover, "abort", _aborts_only_what_is_pending
    ),
    "lost peers are remembered while stages join": _forgets_lost,
    "a stage waits for the outcome of its requests": _leaves_when_its_leader_does,
}
