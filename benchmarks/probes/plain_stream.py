"""How fast UCX alone carries messages between two processes of this machine, without our lanes.

The sender has a few messages of a piece's size under way; the receiver fetches them. Nothing is
framed, copied or verified. Either end uses a few buffers again and again, which stay in its caches,
or walks through a slab that no cache holds, as parameters and KV are moved.
"""

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.probes.slab_walk import SlabWalk
from services.common.clock import monotonic_s
from services.common.lifecycle import die_with_parent
from services.worker.engine.transfer.errors import LaneClosed
from services.worker.engine.transfer.ucx_config import UcxConfig
from services.worker.engine.transfer.ucx_transport import Endpoint, UcxRequest, UcxTransport

MESSAGE_BYTES = 1 << 20
UNDER_WAY = 2
BUFFERS = 8
TIMEOUT_S = 30.0
CACHED_TAG, SLAB_TAG = 1, 2
"""Tell the receiver which memory a message is fetched into."""


class PlainStream:
    """The sending end. The receiver never sleeps, so it is stopped while nothing is measured."""

    def __init__(
        self, transport: UcxTransport, endpoint: Endpoint, receiver: subprocess.Popen[bytes]
    ) -> None:
        self._receiver = receiver
        self._transport = transport
        self._endpoint = endpoint
        self._buffers = SlabWalk(np.ones(UNDER_WAY * MESSAGE_BYTES, np.uint8))

    def cached_bytes_per_s(self, messages: int) -> float:
        """Send so many from cache to cache. Raises LaneClosed, ConnectionError."""
        return self._measured(messages, self._buffers, CACHED_TAG)

    def bytes_per_s(self, messages: int, slab: SlabWalk) -> float:
        """Send so many from slab to slab. Raises LaneClosed, ConnectionError."""
        return self._measured(messages, slab, SLAB_TAG)

    def _measured(self, messages: int, memory: SlabWalk, tag: int) -> float:
        """Send so many, and wait until all are taken."""
        self._receiver.send_signal(signal.SIGCONT)
        try:
            under_way: deque[UcxRequest] = deque()
            began_s = monotonic_s()
            for _ in range(messages):
                self._await(under_way, UNDER_WAY - 1)
                under_way.append(self._endpoint.send(memory.next(MESSAGE_BYTES), tag))
            self._await(under_way, 0)
            return messages * MESSAGE_BYTES / (monotonic_s() - began_s)
        finally:
            self._receiver.send_signal(signal.SIGSTOP)

    def _await(self, under_way: deque[UcxRequest], most: int) -> None:
        until_s = monotonic_s() + TIMEOUT_S
        while len(under_way) > most:
            self._transport.progress()
            if under_way[0].completed:
                under_way.popleft()
            elif monotonic_s() > until_s:
                raise LaneClosed("the other process takes nothing")


@contextmanager
def plain_stream(config: UcxConfig) -> Iterator[PlainStream]:
    """Start the other process. Raises UcxUnavailable, OSError, ConnectionError."""
    command = [sys.executable, "-m", __spec__.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdin is None or process.stdout is None:
                raise OSError("the other process has no pipes")
            transport = UcxTransport(config)
            process.stdin.write(f"{config.transports}\n{config.devices}\n".encode())
            process.stdin.write(f"{transport.address.hex()}\n".encode())
            process.stdin.flush()
            address = bytes.fromhex(process.stdout.readline().decode().strip())
            process.send_signal(signal.SIGSTOP)
            yield PlainStream(transport, transport.open(address), process)
        finally:
            process.kill()


def receive() -> None:
    """Take messages and throw them away, until this process is killed."""
    die_with_parent()
    transports, devices, address = (sys.stdin.readline().strip() for _ in range(3))
    transport = UcxTransport(UcxConfig(transports, devices))
    memory = {
        CACHED_TAG: SlabWalk(np.ones(BUFFERS * MESSAGE_BYTES, np.uint8)),
        SLAB_TAG: SlabWalk.of_a_slab(),
    }
    print(transport.address.hex(), flush=True)
    endpoint = transport.open(bytes.fromhex(address))
    under_way: deque[UcxRequest] = deque()
    while endpoint.alive:
        transport.progress()
        while under_way and under_way[0].completed:
            under_way.popleft()
        arrival = transport.probe() if len(under_way) < BUFFERS else None
        if arrival is not None:
            place = memory[arrival.tag].next(arrival.size_bytes)
            under_way.append(transport.fetch(arrival, place))


if __name__ == "__main__":
    receive()
