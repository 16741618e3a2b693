"""Child processes of services, which have threads and an event loop.

`subprocess` starts a child by vfork, in which nothing of ours runs. The event loop's own way is a
fork, where gRPC's handlers for forks run as well: on a busy machine they crashed one of twelve
children before it began.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO


class Child:
    """A process, from its start to its end. Begin it within an event loop, and `kill` it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: bool = False,
        new_session: bool = False,
        quiet: bool = False,
    ) -> None:
        """Its input is a pipe; its output is one if `output` is set.

        With `quiet` its messages go nowhere. `new_session`: it leads a process group of its own,
        which ends with it.

        Raises:
            OSError: if it cannot be started.
        """
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if output else None,
            stderr=subprocess.DEVNULL if quiet else None,
            env=env,
            start_new_session=new_session,
        )
        self._leads = new_session
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._watch, name=f"child {self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its id."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    @property
    def input(self) -> IO[bytes]:
        """Where it reads from."""
        assert self._popen.stdin is not None
        return self._popen.stdin

    @property
    def output(self) -> IO[bytes]:
        """What it writes, if it was started so."""
        assert self._popen.stdout is not None, "started without its output"
        return self._popen.stdout

    async def wait(self) -> int:
        """Its exit code once it has ended; several may wait."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it at once, with its group if it leads one; nothing is left to do once it ended."""
        if self.returncode is None:
            (os.killpg if self._leads else os.kill)(self.pid, signal.SIGKILL)

    def _watch(self) -> None:
        # The id is not used again before the loop knows of the end: `kill` hits no other process.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        try:
            self._loop.call_soon_threadsafe(self._reap)
        except RuntimeError:  # the loop is over: nobody waits any more
            self._popen.wait()

    def _reap(self) -> None:
        if self._leads:
            os.killpg(self.pid, signal.SIGKILL)
        self._ended.set_result(self._popen.wait())
