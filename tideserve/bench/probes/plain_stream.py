"""How fast UCX alone carries messages between two processes of this machine, without our lanes.

The sender has a few messages of a piece's size under way, of memory that is used again and again;
the receiver fetches them into such memory. Nothing is framed, copied or verified.
"""

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from services.common.clock import monotonic_s
from services.common.lifecycle import die_with_parent
from services.worker.engine.transfer.errors import LaneClosed
from services.worker.engine.transfer.ucx_config import UcxConfig
from services.worker.engine.transfer.ucx_transport import Endpoint, UcxRequest, UcxTransport

MESSAGE_BYTES = 1 << 20
UNDER_WAY = 2
BUFFERS = 8
TIMEOUT_S = 30.0
TAG = 1


class PlainStream:
    """The sending end. The receiver never sleeps, so it is stopped while nothing is measured."""

    def __init__(
        self, transport: UcxTransport, endpoint: Endpoint, receiver: subprocess.Popen[bytes]
    ) -> None:
        self._receiver = receiver
        self._transport = transport
        self._endpoint = endpoint
        self._buffers = [np.ones(MESSAGE_BYTES, np.uint8) for _ in range(UNDER_WAY)]

    def bytes_per_s(self, messages: int) -> float:
        """Send so many, and wait until all are taken. Raises LaneClosed, ConnectionError."""
        self._receiver.send_signal(signal.SIGCONT)
        try:
            return self._measured(messages)
        finally:
            self._receiver.send_signal(signal.SIGSTOP)

    def _measured(self, messages: int) -> float:
        under_way: deque[UcxRequest] = deque()
        began_s = monotonic_s()
        for number in range(messages):
            self._await(under_way, UNDER_WAY - 1)
            buffer = self._buffers[number % UNDER_WAY]
            under_way.append(self._endpoint.send(buffer, TAG))
        self._await(under_way, 0)
        return messages * MESSAGE_BYTES / (monotonic_s() - began_s)

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
    print(transport.address.hex(), flush=True)
    endpoint = transport.open(bytes.fromhex(address))
    buffers = [np.empty(MESSAGE_BYTES, np.uint8) for _ in range(BUFFERS)]
    under_way: deque[UcxRequest] = deque()
    number = 0
    while endpoint.alive:
        transport.progress()
        while under_way and under_way[0].completed:
            under_way.popleft()
        arrival = transport.probe() if len(under_way) < BUFFERS else None
        if arrival is not None:
            under_way.append(transport.fetch(arrival, buffers[number % BUFFERS]))
            number += 1


if __name__ == "__main__":
    receive()
