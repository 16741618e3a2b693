"""Runs a child process that exchanges messages (messages.py) with this process over pipes."""

import asyncio
import contextlib
import sys

from services.common.child import Child
from services.common.messages import LENGTH


class MessagePipes:
    """A child process and the pipes to it. The creator calls `kill` and `wait`."""

    def __init__(
        self, process: Child, input_pipe: asyncio.WriteTransport, output: asyncio.StreamReader
    ) -> None:
        """Use `start`."""
        self.process = process
        self._input, self._output = input_pipe, output

    @classmethod
    async def start(cls, module: str) -> "MessagePipes":
        """Run `module` as a child process. Raises OSError if it cannot be started."""
        process = Child((sys.executable, "-m", module), output=True, new_session=True, quiet=True)
        loop, output = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), process.output)
        input_pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.input)
        return cls(process, input_pipe, output)

    def send(self, data: bytes) -> None:
        """Write an encoded message; no effect once the process has ended."""
        # uvloop raises RuntimeError for a pipe whose other end is closed.
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._input.write(data)

    async def receive(self) -> bytes | None:
        """Read the next message; None once the process has closed its output."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await self._output.readexactly(LENGTH.size)
            return await self._output.readexactly(LENGTH.unpack(head)[0])
        return None

    async def end(self) -> int:
        """Kill the process and return its exit code."""
        self.process.kill()
        self._input.close()
        return await self.process.wait()
