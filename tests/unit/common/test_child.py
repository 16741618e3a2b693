"""Children of a service: their input, their output and their ends."""

import asyncio
import signal
import sys

import pytest
import uvloop

from services.common.child import Child

ECHO = (sys.executable, "-c", "import sys; sys.stdout.write(sys.stdin.read()); sys.exit(3)")
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def test_a_child_reads_writes_and_ends_under_both_event_loops() -> None:
    async def run() -> None:
        child = Child(ECHO, output=True)
        assert child.returncode is None and child.pid > 0
        with child.input as pipe:
            pipe.write(b"words")
        assert await asyncio.gather(child.wait(), child.wait()) == [3, 3]
        with child.output as pipe:
            assert pipe.read() == b"words"
        assert child.returncode == 3

    asyncio.run(run())
    uvloop.run(run())


async def test_a_child_is_killed_and_whoever_gives_up_waiting_harms_nobody() -> None:
    child = Child(SLEEP, new_session=True, quiet=True)
    waiting = asyncio.create_task(child.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    child.input.close()


async def test_what_cannot_be_started_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        Child(("/no/such/program",))
