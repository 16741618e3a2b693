"""A configuration is left when nothing of it is in flight, and no stage keeps a block of it."""

from dataclasses import dataclass, field
from threading import Lock

import pytest

from services.core.planner.block_ledger import Follower
from services.core.planner.config import IterationConfig
from services.core.planner.events import IterationFinished, RequestArrived
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling
from services.worker.engine.pipeline.configuration import Configuration
from services.worker.engine.pipeline.draining import DRAIN_TIMEOUT_S, DRAINED_TIMEOUT_S, Draining
from services.worker.engine.pipeline.frames import KINDS, Drained
from services.worker.engine.pipeline.handover import Handover
from services.worker.engine.pipeline.links import Links
from services.worker.engine.transfer.frame import FrameCodec
from services.worker.engine.transfer.gate import ActivationGate
from services.worker.engine.transfer.lane import Identity
from services.worker.ipc import GroupPlan, Lane, MemberPlan
from tests.support.local_lane import LocalNetwork
from tests.support.transfer import NONCE

CONFIG = IterationConfig(
    block_size=4, num_blocks=16, max_batch_tokens=32, max_running=4, max_waiting=4
)


@dataclass
class FakeStage:
    """What a stage has beside a model."""

    lock: Lock = field(default_factory=Lock)


class End:
    """One of two members, "a" and "b"; "a" leads."""

    def __init__(self, name: str, network: LocalNetwork) -> None:
        self.now_s = 0.0
        self.state = PlannerState(CONFIG)
        self.links = Links(network.lane(Identity(name, "1")), name, ActivationGate())
        self.handover = Handover(name, self.state, self.links, lambda: self.now_s)
        self.draining = Draining(
            self.state, FakeStage(), self.links, self.handover, lambda: self.now_s
        )
        members = [
            MemberPlan(one, "1", 2 * i, 2 * i + 2, Lane("", ""), Lane("", ""), "")
            for i, one in enumerate("ab")
        ]
        self.configuration = Configuration.of([GroupPlan("g", 1, members)], name)
        self.links.enter("g", 1)

    def is_done(self) -> bool:
        return self.draining.is_done(self.configuration, at_once=False)


class Pair:
    """Both, connected; "a" leads a pipeline in which "r" has begun to run."""

    def __init__(self) -> None:
        self.network = LocalNetwork(FrameCodec(KINDS))
        self.a, self.b = End("a", self.network), End("b", self.network)
        self.b.links.lane.expect(Identity("a", "1"), NONCE)
        self.a.links.lane.connect("b", self.b.links.lane.address, NONCE)
        self.network.pump()
        self.a.state.configure((Follower(16),))
        request = Request("r", (5,) * 6, Sampling(), Limits(4), 0.0)
        self.a.state.handle(RequestArrived(0.0, request))
        self.number = self.launch()

    def launch(self) -> int:
        """Plan a microbatch, which reaches "b"."""
        microbatch = self.a.state.plan()
        assert microbatch is not None
        chunks = ((one.request_id, len(one.block_ids)) for one in microbatch.batch.chunks)
        self.b.state.table.apply(microbatch.released, chunks)
        return microbatch.number

    def drained(self) -> list[Drained]:
        """What "b" is told, and takes."""
        self.network.pump()
        found = [one.body for one in self.b.links.receive() if isinstance(one.body, Drained)]
        for body in found:
            self.b.draining.note(self.b.configuration, body)
        return found


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_leader_waits_for_what_is_in_flight(pair: Pair) -> None:
    pair.a.draining.begin(pair.a.configuration)
    pair.b.draining.begin(pair.b.configuration)
    assert not pair.a.is_done() and not pair.b.is_done()
    pair.a.state.handle(IterationFinished(0.1, {"r": 7}, pair.number))
    assert pair.a.is_done()
    assert pair.drained() == [Drained(())]
    assert pair.b.is_done()
    assert pair.b.state.table.request_ids == ("r",)


def test_blocks_of_what_was_given_up_are_free_at_every_stage(pair: Pair) -> None:
    pair.a.draining.begin(pair.a.configuration)
    pair.b.draining.begin(pair.b.configuration)
    pair.a.now_s = pair.b.now_s = DRAIN_TIMEOUT_S + 0.1
    assert pair.a.is_done()
    assert not pair.b.is_done(), "only the leader knows what is to be freed"
    assert pair.drained() == [Drained(("r",))]
    assert pair.b.is_done()
    for end in (pair.a, pair.b):
        assert end.state.table.request_ids == ()
        assert end.state.pool.taken_count == 0
    assert [one.request_id for one in pair.a.state.waiting] == ["r"]


def test_blocks_of_who_never_ran_are_free_before_the_next_leader_counts(pair: Pair) -> None:
    """The own use is told to it as soon as the configuration is left, before requests are dealt."""
    long = Request("long", (5,) * 40, Sampling(), Limits(4), 0.0)
    late = Request("late", (5,) * 8, Sampling(), Limits(4), 0.0)
    for request in (long, late):
        pair.a.state.handle(RequestArrived(0.0, request))
    number = pair.launch()
    pair.a.draining.begin(pair.a.configuration)
    pair.a.state.handle(IterationFinished(0.1, {"r": 7}, pair.number))
    pair.a.state.handle(IterationFinished(0.1, {}, number))
    assert pair.a.state.sequences["late"].blocks and not pair.a.state.sequences["late"].computed
    assert pair.a.is_done()
    assert pair.a.state.table.request_ids == ("r", "long")
    assert not pair.a.state.sequences["late"].blocks
    assert pair.drained() == [Drained(("late",))]
    assert pair.b.state.table.request_ids == ("r", "long")


def test_a_stage_gives_a_leader_up_in_the_end(pair: Pair) -> None:
    pair.b.draining.begin(pair.b.configuration)
    pair.b.now_s = DRAINED_TIMEOUT_S
    assert not pair.b.is_done()
    pair.b.now_s += 0.1
    assert pair.b.is_done()


def test_a_lost_member_is_not_waited_for(pair: Pair) -> None:
    pair.a.draining.begin(pair.a.configuration)
    pair.b.draining.begin(pair.b.configuration)
    assert pair.b.draining.is_done(pair.b.configuration, at_once=True)
    assert pair.a.draining.is_done(pair.a.configuration, at_once=True)
