"""What lies between the engines of an `EngineGroup`: queues that the group empties, or UCX."""

import select
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial

from services.common.clock import monotonic_s
from services.worker.engine.pipeline.frames import KINDS
from services.worker.engine.transfer.frame import FrameCodec
from services.worker.engine.transfer.lane import Identity, Lane
from services.worker.engine.transfer.pieces import BULK_KINDS
from services.worker.engine.transfer.ucx_config import UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import UcxLane
from tests.support.local_lane import LocalNetwork

TURN_S = 0.01
REST_S = 0.002


class EngineNetwork(ABC):
    """Makes the lanes of engines in one process; also their clock."""

    @abstractmethod
    def lanes(self, identity: Identity) -> tuple[Lane, Lane]:
        """The activation lane and the bulk lane of an engine; it closes them."""

    @abstractmethod
    def now_s(self) -> float:
        """The time of this turn; asked for once a turn."""

    @abstractmethod
    def deliveries(self) -> list[Callable[[], None]]:
        """The deliveries that are possible now; calling one makes it happen."""

    @abstractmethod
    def rest(self) -> None:
        """Nobody has anything to do until something arrives, or time passes."""

    @abstractmethod
    def cut(self, worker_id: str) -> None:
        """A worker has died; its lanes are about to be closed."""


class QueueNetwork(EngineNetwork):
    """Nothing moves by itself, no time passes but by turns: all is the group's choice."""

    def __init__(self, turn_s: float = TURN_S) -> None:
        """A turn lasts `turn_s`."""
        self._activations = LocalNetwork(FrameCodec(KINDS))
        self._bulk = LocalNetwork(FrameCodec(BULK_KINDS))
        self._turn_s = turn_s
        self._now_s = 0.0

    def lanes(self, identity: Identity) -> tuple[Lane, Lane]:
        return self._activations.lane(identity), self._bulk.lane(identity)

    def now_s(self) -> float:
        self._now_s += self._turn_s
        return self._now_s

    def skip(self, seconds: float) -> None:
        """Time passes in which nothing happens."""
        self._now_s += seconds

    def deliveries(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for network in (self._activations, self._bulk):
            network.connect_pending()
            found += [partial(network.deliver, *link) for link in network.waiting()]
        return found

    def rest(self) -> None:
        return  # the next turn is later, that is all

    def cut(self, worker_id: str) -> None:
        for network in (self._activations, self._bulk):
            network.cut(worker_id)

    def part(self, one: str, other: str, tell: Collection[str]) -> None:
        """The connections of a pair break; those in `tell` notice, the others by `tell_untold`."""
        for network in (self._activations, self._bulk):
            network.part(one, other, tell)

    def separate(self, one: str, other: str) -> None:
        """The connections of a pair break, and none is made any more."""
        for network in (self._activations, self._bulk):
            network.separate(one, other)

    def tell_untold(self, one: str, other: str) -> None:
        """The one of a pair that has not noticed a break notices it."""
        for network in (self._activations, self._bulk):
            network.tell_untold(one, other)


class UcxNetwork(EngineNetwork):
    """Real lanes with their threads: the order of turns is seeded, the time of a frame is not.

    Raises UcxUnavailable when lanes are asked for.
    """

    def __init__(self) -> None:
        # A busy machine may keep a thread waiting for longer than the defaults.
        self._config = UcxLaneConfig(
            connect_timeout_s=60.0, hello_timeout_s=60.0, silence_timeout_s=60.0
        )
        self._lanes: dict[str, tuple[Lane, Lane]] = {}

    def lanes(self, identity: Identity) -> tuple[Lane, Lane]:
        made = (
            UcxLane(identity, FrameCodec(KINDS), self._config),
            UcxLane(identity, FrameCodec(BULK_KINDS), self._config),
        )
        self._lanes[identity.worker_id] = made
        return made

    def now_s(self) -> float:
        return monotonic_s()

    def deliveries(self) -> list[Callable[[], None]]:
        return []

    def rest(self) -> None:
        descriptors = [lane.fileno() for pair in self._lanes.values() for lane in pair]
        select.select(descriptors, [], [], REST_S)

    def cut(self, worker_id: str) -> None:
        del self._lanes[worker_id]
