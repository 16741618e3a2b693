"""Sends heartbeats to the servicer process from a thread of the engine.

The main loop reports only between iterations, which may take seconds. The heartbeats continue
during an iteration, so the servicer can distinguish a busy process from a stopped or hung process.
"""

from threading import Thread
from time import sleep

import zmq

from services.worker.ipc import HEARTBEAT_INTERVAL_S, heartbeat_address

QUEUED_MAX = 4
"""Heartbeats queued for a servicer that does not read; further heartbeats are discarded."""


def start_heartbeat(address: str) -> None:
    """Start the heartbeat thread; `address` is the address of the engine's socket."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, QUEUED_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(heartbeat_address(address))
    Thread(target=_beat, args=(socket,), name="heartbeat", daemon=True).start()


def _beat(socket: zmq.Socket[bytes]) -> None:
    while True:
        try:
            socket.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            pass  # the queue is full: the servicer does not read
        except zmq.ZMQError:
            return  # the ZeroMQ context was terminated: the process exits
        sleep(HEARTBEAT_INTERVAL_S)
