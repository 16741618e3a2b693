"""Hands sequences to other leaders when groups change: who gets which, and when it is done.

A request is aborted at the worker that led it before, until its stream has moved. That worker
passes the abort on, whether or not a gateway is there to do so.
"""

from collections.abc import Callable, Container

from services.core.changeover.handover import deal
from services.core.groups.layer_map import Stage
from services.core.planner.events import RequestAborted
from services.core.planner.sequence_names import request_of
from services.core.planner.state import IterationState
from services.worker.engine.pipeline.configuration import Configuration, stages_of
from services.worker.engine.pipeline.frames import Adopt, Adopted, FreeKv, GivenUp
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.serving import Serving
from services.worker.ipc import MovedRequest


class Handover:
    """Of the last change. `pending`: sequence → the leader that has yet to adopt it.

    `old_stages` held the sequences until then, as the group `old_group`. `_dealt`: to whom each
    sequence of the old leader went, pending or adopted since.
    """

    def __init__(
        self, worker_id: str, state: IterationState, links: Links, now_s: Callable[[], float]
    ) -> None:
        self.pending: dict[str, str] = {}
        self.old_stages: tuple[Stage, ...] = ()
        self.old_group = ""
        self._worker_id = worker_id
        self._state = state
        self._links = links
        self._now_s = now_s
        self._given_up: set[str] = set()  # of `pending`
        self._gone: dict[str, str] = {}  # request id → the leader that has adopted it
        self._dealt: dict[str, str] = {}
        self._freeing: dict[str, set[str]] = {}  # request that came back → where its KV still is

    @property
    def settled(self) -> bool:
        """Whether every request has found its leader."""
        return not self.pending and not self._freeing

    def begin(self, old: Configuration | None, num_layers: int) -> None:
        """A change begins; `old` None is the time before the first configuration."""
        self.pending.clear()
        self._gone.clear()
        self._dealt.clear()
        self._freeing.clear()
        self.old_stages = old.stages if old else (Stage(self._worker_id, 0, num_layers),)
        self.old_group = old.group_id if old else ""

    def end_given_up(self) -> None:
        """End what was aborted on its way to a leader that was lost before it adopted it."""
        for request_id in self._given_up & self._state.sequences.keys():
            self._state.handle(RequestAborted(self._now_s(), request_id))
        self._given_up.clear()

    def deal(self, new: Configuration) -> None:
        """Give each sequence of this old leader to one of the new leaders, by blocks.

        No block is freed here: how many this worker uses has been told to its new leader.
        """
        old_workers = {stage.worker_id for stage in self.old_stages}
        leaders = {
            stages_of(group)[0].worker_id
            for group in new.groups
            if any(member.worker_id in old_workers for member in group.members)
        }
        # A worker that is leaving gets none, unless there is no other.
        staying = {one for one in leaders if not new.members[one].draining}
        for sequence, leader in deal(self._state.sequences.values(), staying or leaders):
            if sequence.blocks:
                self._state.hold(sequence.request_id)
            else:
                self._state.resume(sequence.request_id)  # nothing of it has to move
            if leader != self._worker_id:
                self.send(sequence.request_id, leader)

    def send(self, request_id: str, leader: str) -> None:
        """Hand a sequence to `leader`; it is held here until that has adopted it."""
        self._state.hold(request_id)
        state = self._state.export(request_id)
        self.pending[request_id] = self._dealt[request_id] = leader
        self._links.send(
            leader,
            Adopt(
                sequence=state,
                origin=self.old_group,
                stages=self.old_stages if state.blocks else (),
                highest_block=self._state.table.highest_block((request_id,)),
                age_s=self._now_s() - state.arrival_s,
            ),
        )

    def lose(self, leader: str, gone: Container[str]) -> list[str]:
        """A new leader is gone: have what it was dealt freed where it was; returns what comes back.

        Those are the sequences that it had not adopted for all that is known here. They are held
        until `note_freed`: what they have at any stage, that one frees, and tells its own leader.
        `gone` are all whom nothing can be sent.
        """
        back = []
        stages = {stage.worker_id for stage in self.old_stages if stage.worker_id not in gone}
        for request_id in [name for name, to in self._dealt.items() if to == leader]:
            del self._dealt[request_id]
            if self.pending.pop(request_id, None) is not None:
                self._state.start_over(request_id)
                self._freeing[request_id] = set(stages)
                back.append(request_id)
            for worker_id in sorted(stages):
                self._links.send(worker_id, FreeKv(request_id, whole_table=True))
        return back

    def note_freed(self, worker_id: str, request_id: str) -> bool:
        """A stage has freed a request's KV; whether one that came back may go on now."""
        left = self._freeing.get(request_id)
        if left is None:
            return False
        left.discard(worker_id)
        if left:
            return False
        del self._freeing[request_id]
        return request_id in self._state.sequences and request_id not in self.pending

    def forget_stage(self, worker_id: str) -> list[str]:
        """A stage is gone, and with it its KV; returns who may go on now."""
        return [name for name in tuple(self._freeing) if self.note_freed(worker_id, name)]

    def was_given_up(self, request_id: str) -> bool:
        """Whether a request that has come back was aborted while it was away; told once."""
        if request_id not in self._given_up:
            return False
        self._given_up.discard(request_id)
        return True

    def give_up(self, request_id: str) -> bool:
        """Pass an abort on to the leader that has the request now; False if that is this one."""
        if request_id in self.pending:
            # It goes there in any case; the abort must not overtake it.
            self._given_up.add(request_id)
            return True
        leader = self._gone.pop(request_id, None)
        if leader is None or request_id in self._state.sequences:
            return False
        self._links.send(leader, GivenUp(request_id))
        return True

    def note_adopted(
        self, peer: str, body: Adopted, configuration: Configuration, serving: Serving
    ) -> None:
        """The new leader has the sequence: whoever reads it is sent on."""
        if self.pending.pop(body.request_id, None) is None:
            return
        self._state.forget(body.request_id)
        if body.request_id in self._given_up:
            self._given_up.discard(body.request_id)
            self._links.send(peer, GivenUp(body.request_id))
            return
        self._gone[body.request_id] = peer
        member = configuration.members[peer]
        group = next(g for g in configuration.groups if member in g.members)
        serving.note_end(body.request_id, self._now_s())
        serving.news.moved.append(
            MovedRequest(
                request_of(body.request_id),
                peer,
                member.grpc_address,
                group.group_id,
                group.epoch,
                body.next_index,
            )
        )
