"""A simulated worker as a member of its group: gets ready, changes configuration, moves KV.

The steps are those of a real worker (services/worker/engine/pipeline/member.py): the old leader
lets its microbatches come back and tells its stages; each member switches its layers, with a pause,
and joins its new leader; old leaders hand their sequences over; these go on once their KV is whole.
The fence, the division of sequences and the order of the exchange are those of `services.core`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from services.core.changeover.handover import absent_stages, deal, followers_of
from services.core.groups.fence import (
    AbortAsked,
    AbortPreparation,
    MemberState,
    PrepareAsked,
    Verdict,
)
from services.core.groups.layer_map import Stage
from services.core.groups.vocabulary import Group, StoredGroup
from services.core.planner.sequence import Phase, SequenceState
from tideserve.sim.capacity import Capacity
from tideserve.sim.change_log import ChangeLog
from tideserve.sim.change_spec import ChangeSpec
from tideserve.sim.configuration import Configuration
from tideserve.sim.engine import Simulation
from tideserve.sim.instance import Instance
from tideserve.sim.kv_exchange import LeaderExchange, MemberExchange
from tideserve.sim.network import MESSAGE_BYTES, Network
from tideserve.sim.pipeline import Pipeline
from tideserve.sim.preparation import Preparation
from tideserve.sim.stage_memory import StageMemory
from tideserve.sim.time_model import TimeModel

Answered = Callable[[str, str, bool, str], None]
"""Takes attempt, worker, whether it is ready, and why not."""
Choose = Callable[["Member"], Callable[..., None]]
"""Which method of a member takes a message."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """A sequence for its new leader, as its old one (of group `origin`) has it."""

    state: SequenceState
    origin: str
    stages: tuple[Stage, ...]
    highest_block: int


@dataclass(slots=True)
class World:
    """What the members of a cluster share."""

    simulation: Simulation
    network: Network
    time_model: TimeModel
    spec: ChangeSpec
    log: ChangeLog
    members: dict[str, "Member"]


class Member:
    """Joins an instance with the group protocol.

    All methods are called between iterations, but those that reach the worker from outside.
    """

    def __init__(self, instance: Instance, world: World, group: Group) -> None:
        self.instance = instance
        self.name = instance.name
        self.state = instance.state
        block_size = self.state.config.block_size
        self.memory = StageMemory(world.spec.shape, world.spec.arena_bytes, block_size)
        self.fence = MemberState(self.name, self.name, group_id=group.group_id, epoch=group.epoch)
        self.configuration = Configuration.of(group, self.name, (group,))
        self.exchange = LeaderExchange(self, self.state, world.spec.costs.exchange_window)
        self.kv = MemberExchange(self, self.state, self.memory, world.log)
        self.capacity = Capacity(self, self.state)
        self._world = world
        self._answered: Answered | None = None
        self._old = self.configuration
        self._next: Configuration | None = None
        self._is_changing = False
        self._drained = False
        self._joined: dict[str, tuple[int, int]] | None = None
        self._deferred: list[tuple[Choose, tuple[Any, ...]]] = []  # until the stages are known
        self._future: list[tuple[int, Choose, tuple[Any, ...]]] = []  # of later epochs
        self._not_done: set[str] = set()  # who may still hand us sequences
        self._pending: set[str] = set()  # handed over, not adopted yet
        self._pause_s = 0.0
        instance.turn = self.take_turn

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of the present group; the first leads."""
        return self.configuration.stages

    @property
    def settled(self) -> bool:
        """Whether the last change is wholly over, so that another one may be prepared."""
        return (
            self._next is None
            and self._joined is None
            and not self._not_done
            and not self._pending
            and self.exchange.settled
            and self.kv.settled
        )

    def check_invariants(self) -> None:
        """Those of core, of the memory, and that both agree."""
        self.fence.check_invariants()
        self.state.check_invariants()
        self.memory.check_invariants()
        self.exchange.check_invariants()
        assert self.state.pool.num_blocks <= self.memory.blocks
        if self.settled and self.configuration.leads:
            assert not self.state.held, "a sequence is held for nothing"

    # --- from outside

    def ask(self, asked: PrepareAsked, groups: tuple[Group, ...], answered: Answered) -> None:
        """A coordinator asks to get ready for `asked.target`, one of `groups`."""
        answer = self.fence.ask(asked)
        if answer.aborted is not None:
            self._undo(answer.aborted.attempt)
        if answer.verdict is not Verdict.ACCEPTED:
            answered(asked.attempt, self.name, False, answer.reason)
        elif not self.settled:
            self.fence.abort_own(asked.attempt)
            answered(asked.attempt, self.name, False, "the last change is not over here yet")
        else:
            self._answered = answered
            self.capacity.preparation = Preparation(
                asked.attempt,
                Configuration.of(asked.target, self.name, groups).layers,
                self,
                self.state,
                self.memory,
                self._world.spec.costs,
                self._world.simulation,
                self.instance.wake,
            )
            self.instance.wake()

    def abort(self, asked: AbortAsked) -> None:
        """A coordinator aborts an attempt."""
        aborted = self.fence.abort(asked)
        if aborted is not None:
            self._undo(aborted.attempt)

    def observe(self, stored: tuple[StoredGroup, ...]) -> None:
        """The store has these new records, written together."""
        for action in self.fence.observe(stored):
            if isinstance(action, AbortPreparation):
                self._undo(action.attempt)
                continue
            groups = tuple(one.group for one in stored if one.group.members)
            self._next = Configuration.of(action.group, self.name, groups)
            self._is_changing = True
            self.instance.reporter.epoch = action.group.epoch
            self.instance.launches = False
            self.instance.wake()

    def _undo(self, attempt: str) -> None:
        preparation = self.capacity.preparation
        if preparation is not None and preparation.attempt == attempt:
            preparation.undo()
            self.capacity.preparation = None

    # --- messages

    def send(self, worker_id: str, choose: Choose, *arguments: Any) -> None:
        """See `Post`."""
        member = self._world.members[worker_id]
        deliver = (member.instance.post, member.deliver, self.configuration.epoch, choose)
        if worker_id == self.name:
            self._world.simulation.after(0.0, *deliver, arguments)
        else:
            self._world.network.send(self.name, MESSAGE_BYTES, *deliver, arguments)

    def send_along(self, choose: Choose, *arguments: Any) -> None:
        """See `Post`."""
        members, pipeline = self._world.members, self.instance.pipeline
        assert pipeline is not None
        pipeline.tell(
            self.configuration.index,
            lambda name: members[name].deliver,
            self.configuration.epoch,
            choose,
            arguments,
        )

    def send_bulk(self, worker_id: str, size_bytes: int, choose: Choose, *arguments: Any) -> None:
        """See `Post`."""
        member = self._world.members[worker_id]
        deliver = (member.instance.post, member.deliver, self.configuration.epoch, choose)
        self._world.network.send_bulk(self.name, size_bytes, *deliver, arguments)

    def deliver(self, epoch: int, choose: Choose, arguments: tuple[Any, ...]) -> None:
        """Take a message of an epoch: stale ones have no effect, those of later ones wait."""
        if epoch > self.configuration.epoch:
            self._future.append((epoch, choose, arguments))
        elif epoch == self.configuration.epoch:
            handler = choose(self)
            if self._joined is None or handler in (self.note_joined, self.note_all_adopted):
                handler(*arguments)
            else:
                self._deferred.append((choose, arguments))

    def release(self, released: Iterable[str]) -> None:
        """See `Post`."""
        if released:
            self.state.table.apply(released, ())
            self.kv.forget(released)

    # --- a turn

    def take_turn(self) -> float:
        """Go on with what is under way; returns for how long this worker has to pause now."""
        preparation = self.capacity.preparation
        if preparation is not None and not preparation.over:
            self._advance_preparation(preparation)
        if self._is_changing:
            self._advance_change()
        self.capacity.keep()
        if self.state.sequences and not self.configuration.leads and self._next is None:
            self._pass_arrivals_on()
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s

    def _advance_preparation(self, preparation: Preparation) -> None:
        reason = preparation.advance()
        if preparation.over:
            assert self._answered is not None
            self._answered(preparation.attempt, self.name, not reason, reason)
            if reason:
                self.fence.abort_own(preparation.attempt)
                self._undo(preparation.attempt)

    def _advance_change(self) -> None:
        if self._next is not None and self._is_drained():
            self._end_configuration()
            self._switch(self._next)
        if self._joined is not None and self._all_joined():
            self._begin_leading()
        if self._joined is None:
            self.exchange.advance()
        self.kv.sweep()
        if self.settled:
            self._is_changing = False
            self._world.log.note_settled(self.name, self._world.simulation.now_s)

    # --- changing over

    def _is_drained(self) -> bool:
        """Whether nothing of the present configuration is in flight here, or will come back."""
        if self._pending:
            return False
        if len(self.configuration.stages) > 1 and not self.configuration.leads:
            return self._drained
        return not self.state.in_flight

    def _end_configuration(self) -> None:
        """Free all that it does not pass on, and tell its other stages."""
        released = self.state.end_configuration()
        if len(self.configuration.stages) > 1 and self.configuration.leads:
            self.send_along(lambda one: one.note_drained, released)

    def note_drained(self, released: tuple[str, ...]) -> None:
        """No more microbatches come from the present leader."""
        self.release(released)
        self._drained = True

    def _switch(self, new: Configuration) -> None:
        """Run other layers from here on; the only pause that a change makes."""
        if self.instance.pipeline is not None and self.configuration.leads:
            self._world.log.note_pipelines([self.instance.pipeline])
        self._old, self.configuration, self._next = self.configuration, new, None
        self._drained = False
        self.capacity.preparation = None
        self.capacity.enter()
        self._deferred.clear()
        self.instance.pipeline = None
        self.memory.switch(new.layers)
        pool = self.state.pool
        if self.memory.blocks >= pool.num_blocks:
            pool.grow(self.memory.blocks)
        self.kv.enter()
        self._pause_s = self._world.spec.costs.pause_s
        self._not_done = new.everybody - {self.name} if new.leads else set()
        if new.leads:
            self._joined = {}
        else:
            blocks = pool.usable, pool.taken_count
            self.send(new.leader, lambda one: one.note_joined, self.name, blocks)
        self._hand_over(new)
        if not new.leads:
            self.state.configure()
        for worker_id in sorted(new.leaders - {self.name}):
            self.send(worker_id, lambda one: one.note_all_adopted, self.name)
        future, self._future = self._future, []
        for message in future:
            self.instance.post(self.deliver, *message)

    def _hand_over(self, new: Configuration) -> None:
        """Give each sequence of this old leader to one of the new ones."""
        leaders = new.leaders_for({stage.worker_id for stage in self._old.stages})
        for sequence, leader in deal(self.state.sequences.values(), leaders):
            if sequence.blocks:
                self.state.hold(sequence.request_id)
            if leader != self.name:
                self._give(sequence.request_id, leader)

    def _give(self, request_id: str, leader: str) -> None:
        self.state.hold(request_id)
        state = self.state.export(request_id)
        self._pending.add(request_id)
        stages = self._old.stages if state.blocks else ()
        highest = self.state.table.highest_block((request_id,))
        adopt = Adopt(state, self._old.group.group_id, stages, highest)
        self.send(leader, lambda one: one.adopt, self.name, adopt)

    def _pass_arrivals_on(self) -> None:
        """Requests that came after this worker had stopped leading go to its leader."""
        for request_id in tuple(self.state.sequences):
            if request_id not in self._pending:
                self._give(request_id, self.configuration.leader)

    def note_adopted(self, request_id: str) -> None:
        """The new leader has the sequence."""
        if request_id in self._pending:
            self._pending.remove(request_id)
            self.state.forget(request_id)

    def note_all_adopted(self, worker_id: str) -> None:
        """That old leader hands no more sequences over."""
        self._not_done.discard(worker_id)

    def note_joined(self, worker_id: str, blocks: tuple[int, int]) -> None:
        """A stage has switched; `blocks` that it has, and of these in use."""
        assert self._joined is not None
        self._joined[worker_id] = blocks

    # --- leading

    def _all_joined(self) -> bool:
        assert self._joined is not None
        return all(one.worker_id in self._joined for one in self.configuration.stages[1:])

    def _begin_leading(self) -> None:
        joined, stages = self._joined, self.configuration.stages
        assert joined is not None
        self._joined = None
        mine = [one for one in self.state.sequences.values() if one.request_id not in self._pending]
        self.state.configure(followers_of(stages, self._old.stages, joined))
        self.instance.pipeline = self._pipeline() if len(stages) > 1 else None
        self.instance.launches = True
        self.exchange.enter()
        for sequence in mine:
            if sequence.phase is Phase.HELD:
                request_id = sequence.request_id
                highest = self.state.table.highest_block((request_id,))
                origin = self._old.group.group_id
                self.exchange.add(request_id, origin, self._old.stages, highest)
        deferred, self._deferred = self._deferred, []
        for choose, arguments in deferred:
            choose(self)(*arguments)

    def _pipeline(self) -> Pipeline:
        world, stages = self._world, self.configuration.stages
        return Pipeline(
            [world.members[stage.worker_id].instance for stage in stages],
            [world.spec.shape.time_share(stage) for stage in stages],
            world.simulation,
            world.time_model,
            world.network,
            world.spec.hidden_bytes,
        )

    def adopt(self, worker_id: str, adopt: Adopt) -> None:
        """Take a sequence over."""
        request_id = adopt.state.request.request_id
        if not self.configuration.leads:
            return
        self.state.adopt(adopt.state, absent_stages(self.stages, adopt.stages))
        self.send(worker_id, lambda one: one.note_adopted, request_id)
        if adopt.state.blocks:
            self._is_changing = True
            self.exchange.add(request_id, adopt.origin, adopt.stages, adopt.highest_block)
