"""Signs of life from a thread of the engine, which come also while an iteration runs.

The engine's loop speaks between iterations, and these may take long. A process that stands still
has no pulse; one that only computes has.
"""

from threading import Thread
from time import sleep

import zmq

from services.worker.ipc import PULSE_S, pulse_address

KEPT_MAX = 4
"""Signs that wait for a servicer that stands still; more say nothing new."""


def start_pulse(address: str) -> None:
    """Send them until the process ends; `address` is that of the engine's socket."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, KEPT_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(pulse_address(address))
    Thread(target=_beat, args=(socket,), name="pulse", daemon=True).start()


def _beat(socket: zmq.Socket[bytes]) -> None:
    while True:
        try:
            socket.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            pass  # the servicer takes none at the moment
        except zmq.ZMQError:
            return  # the process ends
        sleep(PULSE_S)
