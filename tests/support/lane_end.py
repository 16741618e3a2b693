"""The parts of a UCX lane over memory instead of UCX: connections, traffic and heartbeats.

The handshakes run over real sockets. There is no thread: a test calls `step`.
"""

import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.common.address import listen
from services.common.clock import monotonic_s
from services.worker.engine.transfer.connection_table import ConnectionTable
from services.worker.engine.transfer.control_link import ControlLink
from services.worker.engine.transfer.frame import Bytes, Frame, FrameMemory
from services.worker.engine.transfer.lane import Identity, LaneEvent
from services.worker.engine.transfer.receive_check import ReceiveCheck
from services.worker.engine.transfer.traffic import Traffic
from services.worker.engine.transfer.ucx_config import UcxLaneConfig
from services.worker.engine.transfer.ucx_lane import Heartbeats
from services.worker.engine.transfer.ucx_transport import IncomingMessage
from tests.support.transfer import CODEC

DEADLINE_S = 60.0


@dataclass
class Request:
    """A send or a receive; completed unless its transport delays it."""

    held: bool = False
    problem: str | None = None

    @property
    def completed(self) -> bool:
        return not self.held

    def error(self) -> str | None:
        return self.problem


@dataclass
class MemoryTransport:
    """`UcxTransport` within one process: `peers` holds all transports of a test by address."""

    address: bytes
    peers: dict[bytes, "MemoryTransport"]
    inbox: deque[IncomingMessage] = field(default_factory=deque)
    hold: bool = False
    held: list[Request] = field(default_factory=list)
    fetched: int = 0
    deaf: bool = False
    routes: tuple[str, ...] = ("test/memory",)

    def __post_init__(self) -> None:
        self.peers[self.address] = self

    def renew(self, address: bytes) -> None:
        """Change the address."""
        del self.peers[self.address]
        self.address = address
        self.peers[address] = self

    def progress(self) -> None:
        """No effect."""

    def open(self, address: bytes) -> "MemoryEndpoint":
        if address not in self.peers:
            raise ConnectionError("there is no such address")
        return MemoryEndpoint(self, self.peers[address])

    def probe(self) -> IncomingMessage | None:
        return self.inbox.popleft() if self.inbox and not self.deaf else None

    def fetch(self, arrival: IncomingMessage, memory: Bytes) -> Request:
        memory[:] = arrival.handle
        self.fetched += 1
        return Request()

    def release(self, problem: str | None = None) -> None:
        """Complete the delayed requests."""
        for request in self.held:
            request.held, request.problem = False, problem
        self.held.clear()


@dataclass
class MemoryEndpoint:
    """An endpoint to `target`."""

    source: MemoryTransport
    target: MemoryTransport
    alive: bool = True

    @property
    def routes(self) -> tuple[str, ...]:
        return self.source.routes

    def send(self, message: Bytes, tag: int) -> Request:
        if not self.alive:
            raise ConnectionError("the endpoint is closed")
        self.target.inbox.append(IncomingMessage(tag, message.size, message.copy()))
        request = Request(held=self.source.hold)
        if request.held:
            self.source.held.append(request)
        return request

    def abort(self) -> None:
        self.alive = False


class LaneEnd:
    """Drives the parts of a lane, as `UcxLane` does."""

    def __init__(
        self, worker_id: str, peers: dict[bytes, MemoryTransport], **settings: Any
    ) -> None:
        self.identity = Identity(worker_id, "1")
        self.config = UcxLaneConfig(**settings)
        self.transport = MemoryTransport(worker_id.encode(), peers)
        self.happened = 0
        self.poll = select.epoll()
        self.listener = listen("127.0.0.1", 0, 8)
        self.poll.register(self.listener.fileno(), select.EPOLLIN)
        transport: Any = self.transport
        self.connections = ConnectionTable(
            self.identity, CODEC, self.config, transport, self.poll, self.note
        )
        sender: Any = MemoryTransport(f"{worker_id}'s check".encode(), peers)
        self.check = ReceiveCheck(transport, lambda: sender, self.config.name)
        self.traffic = Traffic(
            transport, self.connections, self.config, FrameMemory(), self.check, self.note
        )
        self.heartbeats = Heartbeats(
            self.connections,
            self.config.heartbeat_s,
            self.config.silence_timeout_s,
            monotonic_s(),
        )
        self.takes = True
        self.news: list[LaneEvent] = []
        self.frames: list[Frame] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def note(self) -> None:
        self.happened += 1

    def connect(self, peer: "LaneEnd", nonce: bytes) -> None:
        self.connections.dial(peer.identity.worker_id, peer.address, nonce)()

    def step(self) -> None:
        """Handle ready sockets and all frames; receive them if the end `takes`."""
        for descriptor, _ in self.poll.poll(0.01):
            if descriptor == self.listener.fileno():
                self.connections.accept(ControlLink(self.listener.accept()[0]))
            else:
                self.connections.attend(descriptor)
        self.traffic.drive(monotonic_s() + self.config.send_timeout_s)
        self.news += self.connections.events()
        if self.takes:
            self.frames += self.take()

    def take(self, leave: tuple[str, ...] = ()) -> list[Frame]:
        """Receive the arrived frames."""
        taken, _ = self.traffic.take(leave)
        return [frame for _, frame in taken]

    def close(self) -> None:
        for connection in list(self.connections.by_descriptor.values()):
            self.connections.disconnect(connection)
        self.poll.close()
        self.listener.close()


def step_until(check: Callable[[], Any], *ends: LaneEnd) -> None:
    """Step all ends until `check` is true."""
    end_s = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end_s, f"nothing came of it within {DEADLINE_S} s"
        for end in ends:
            end.step()
