"""The engine's inbox, whose other end a test holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import zmq

from services.worker.engine.grammar_check import GrammarCheck
from services.worker.engine.loop import EngineLoop
from services.worker.engine.sampling.grammar import Grammars
from services.worker.ipc import Progress, encode, from_engine_decoder

WAIT_MS = 10_000
_NUMBERS = count()


@dataclass
class Inbox:
    """Both ends of the engine's inbox."""

    servicer: zmq.Socket[bytes]
    engine: zmq.Socket[bytes]
    grammars: GrammarCheck

    def loop(self, member: object, *args: Any, **kwargs: Any) -> EngineLoop:
        return EngineLoop(cast(Any, member), self.engine, self.grammars, *args, **kwargs)

    def send(self, frame: Any) -> None:
        self.servicer.send(encode(frame))

    def progress(self) -> Progress:
        assert self.servicer.poll(WAIT_MS), "a token waits for the next turn or a whole microbatch"
        frame = from_engine_decoder.decode(self.servicer.recv())
        assert isinstance(frame, Progress)
        return frame


@contextmanager
def open_inbox(grammars: Grammars) -> Iterator[Inbox]:
    context, check = zmq.Context.instance(), GrammarCheck(grammars, lambda: 0.0)
    with context.socket(zmq.PAIR) as servicer, context.socket(zmq.PAIR) as engine:
        servicer.linger = engine.linger = 0
        # A closed socket may keep its address for a while.
        address = f"inproc://engine-loop-{next(_NUMBERS)}"
        servicer.bind(address)
        engine.connect(address)
        yield Inbox(servicer, engine, check)
    check.close()
