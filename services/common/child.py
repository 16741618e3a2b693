"""Starts child processes of a service, such as a worker's engine, and waits for them.

It uses `subprocess`, which starts a child by vfork without running code of this process in it. The
subprocess support of the event loop (uvloop) forks and runs gRPC's fork handlers, which on a busy
machine crashed 1 child in 12 at its start.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

_PLAIN_NAMES = ("PATH", "LANG", "TZ", "TMPDIR")
_PLAIN_PREFIXES = ("PYTHON", "LC_", "LD_")


def plain_environment() -> dict[str, str]:
    """The variables of the environment that Python needs, without settings and keys."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _PLAIN_NAMES or name.startswith(_PLAIN_PREFIXES)
    }


class Child:
    """A child process. Create it within an event loop, and end it with `kill`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: bool = False,
        new_session: bool = False,
        quiet: bool = False,
    ) -> None:
        """Start the process; its input is a pipe, and so is its output if `output` is set.

        `quiet` discards its standard error. `new_session`: it leads its own process group, whose
        other processes are killed when it ends.

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
        self._leads_group = new_session
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._watch, name=f"child {self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._ended.result() if self._ended.done() else None

    @property
    def input(self) -> IO[bytes]:
        """The pipe to its standard input."""
        assert self._popen.stdin is not None
        return self._popen.stdin

    @property
    def output(self) -> IO[bytes]:
        """The pipe from its standard output; requires `output`."""
        assert self._popen.stdout is not None, "started without its output"
        return self._popen.stdout

    async def wait(self) -> int:
        """Wait until the process has ended; returns the exit code. Several tasks may wait."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Kill the process, and its group if it leads one; no effect once it has ended."""
        if self.returncode is None:
            (os.killpg if self._leads_group else os.kill)(self.pid, signal.SIGKILL)

    def _watch(self) -> None:
        # WNOWAIT keeps the zombie until `_reap` runs, so that the kernel does not reuse the process
        # id and `kill` cannot hit another process.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        try:
            self._loop.call_soon_threadsafe(self._reap)
        except RuntimeError:  # the loop is closed: no task waits for the process
            self._popen.wait()

    def _reap(self) -> None:
        # Other processes of its group may outlive their leader.
        if self._leads_group:
            os.killpg(self.pid, signal.SIGKILL)
        self._ended.set_result(self._popen.wait())
