"""Networks between the engines of an `EngineGroup`: queues that the group drains, or UCX."""

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
    """Creates the lanes of engines in one process, and is their clock."""

    @abstractmethod
    def lanes(self, identity: Identity) -> tuple[Lane, Lane]:
        """The activation and bulk lanes of an engine, which closes them."""

    @abstractmethod
    def now_s(self) -> float:
        """The time of this turn; called once per turn."""

    @abstractmethod
    def deliveries(self) -> list[Callable[[], None]]:
        """The deliveries that are possible now, as callables."""

    @abstractmethod
    def rest(self) -> None:
        """Wait, as no engine has work until a frame arrives or time passes."""

    @abstractmethod
    def cut(self, worker_id: str) -> None:
        """Cut the connections of a dead worker before its lanes are closed."""


class QueueNetwork(EngineNetwork):
    """Frames move only when the group delivers them, and time passes only by turns."""

    def __init__(self, turn_s: float = TURN_S) -> None:
        """`turn_s`: duration of a turn."""
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
        """Advance the clock."""
        self._now_s += seconds

    def deliveries(self) -> list[Callable[[], None]]:
        deliveries: list[Callable[[], None]] = []
        for network in (self._activations, self._bulk):
            network.connect_pending()
            deliveries += [partial(network.deliver, *link) for link in network.waiting()]
        return deliveries

    def rest(self) -> None:
        return  # the clock advances with each turn

    def cut(self, worker_id: str) -> None:
        for network in (self._activations, self._bulk):
            network.cut(worker_id)

    def part(self, first: str, other: str, notify: Collection[str]) -> None:
        """Break the connections of a pair; those in `notify` notice, others by `notify_break`."""
        for network in (self._activations, self._bulk):
            network.part(first, other, notify)

    def separate(self, first: str, other: str) -> None:
        """Break the connections of a pair permanently."""
        for network in (self._activations, self._bulk):
            network.separate(first, other)

    def notify_break(self, first: str, other: str) -> None:
        """Deliver the pending PeerLost events of a pair."""
        for network in (self._activations, self._bulk):
            network.notify_break(first, other)


class UcxNetwork(EngineNetwork):
    """Real lanes with their threads: the order of turns is seeded, arrival times are not.

    `lanes` raises UcxUnavailable.
    """

    def __init__(self) -> None:
        # A busy machine may delay a thread for longer than the default timeouts.
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
