"""Runs a child process that exchanges messages (messages.py) with this process over pipes."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import IO

from services.common.child import Child, plain_environment
from services.common.messages import LENGTH


class MessagePipes(asyncio.Protocol):
    """A child process and the pipes to it. The creator calls `end`."""

    def __init__(self, process: Child) -> None:
        """Use `start`."""
        self.process = process
        self.receive: Callable[[bytes], None] = lambda _: None
        """Called with each message from the process. Set it before the first `send`."""
        self._input: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, module: str) -> "MessagePipes":
        """Run `module` as a child process, without settings and keys in its environment.

        Raises:
            OSError: if it cannot be started.
        """
        command = (sys.executable, "-m", module)
        environment = plain_environment()
        process = Child(command, env=environment, output=True, new_session=True, quiet=True)
        loop, pipes = asyncio.get_running_loop(), cls(process)
        await loop.connect_read_pipe(lambda: pipes, _hand_over(process.output))
        pipes._input, _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, _hand_over(process.input)
        )
        return pipes

    def send(self, data: bytes) -> None:
        """Write an encoded message; no effect once the process has ended."""
        assert self._input is not None
        # uvloop raises RuntimeError for a pipe whose other end is closed.
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._input.write(data)

    async def end(self) -> int:
        """Wait until the process has closed its output; kill it and return its exit code."""
        await asyncio.shield(self._closed)
        self.process.kill()
        if self._input is not None:
            self._input.close()
        return await self.process.wait()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        begin = 0
        while len(buffer) - begin >= LENGTH.size:
            (size,) = LENGTH.unpack_from(buffer, begin)
            end = begin + LENGTH.size + size
            if len(buffer) < end:
                break
            self.receive(bytes(memoryview(buffer)[begin + LENGTH.size : end]))
            begin = end
        del buffer[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)


def _hand_over(pipe: IO[bytes]) -> IO[bytes]:
    """A file with a copy of the descriptor of `pipe`, which is closed; only uvloop closes the copy.

    uvloop closes the descriptor and then the file. If the file closed it again, that would close
    another file, which a thread of gRPC has opened with the same number in between.
    """
    with pipe:
        return open(os.dup(pipe.fileno()), pipe.mode, buffering=0, closefd=False)
