"""A peer that writes continuously until it is killed: `python -m tests.support.writing_peer ADDRESS
ENDPOINT`.

It connects to the lane at ADDRESS and sends one note. Then it writes messages that belong to no
connection to the UCX worker ENDPOINT (hexadecimal) without a pause, through shared memory.
"""

import sys
import time
from collections import deque

import numpy as np

from services.worker.engine.transfer.frame import Frame
from services.worker.engine.transfer.lane import Identity
from services.worker.engine.transfer.receive_check import memory_sender
from services.worker.engine.transfer.ucx_config import UcxConfig
from services.worker.engine.transfer.ucx_transport import UcxRequest
from tests.support.transfer import NONCE, Note
from tests.support.transfer_peer import TESTER, lane

WRITER = Identity("writer", "1")
MESSAGE_BYTES = 32_000  # in one write
UNDER_WAY_MAX = 64


def main(address: str, endpoint: str) -> None:
    """Write until this process is killed."""
    connected = lane(WRITER, "sm,tcp")
    connected.connect(TESTER.worker_id, address, NONCE)
    sent = connected.send(TESTER.worker_id, Frame("g", 1, Note("here"), b""))
    while not sent.done:
        time.sleep(0.001)
    transport = memory_sender(UcxConfig())()
    target = transport.open(bytes.fromhex(endpoint))
    message = np.zeros(MESSAGE_BYTES, np.uint8)
    under_way: deque[UcxRequest] = deque()
    while True:
        under_way.append(target.send(message, tag=1))
        transport.progress()
        while under_way and (under_way[0].completed or len(under_way) > UNDER_WAY_MAX):
            transport.progress()
            if under_way[0].completed:
                under_way.popleft()


if __name__ == "__main__":
    main(*sys.argv[1:])
