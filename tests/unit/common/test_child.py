"""Child processes of a service: input, output and termination."""

import asyncio
import os
import signal
import sys
import threading

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


async def test_a_child_is_killed_and_a_cancelled_wait_harms_no_other() -> None:
    child = Child(SLEEP, new_session=True, quiet=True)
    waiting = asyncio.create_task(child.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    child.input.close()


async def test_the_pid_of_a_child_is_reserved_until_it_is_reaped() -> None:
    child = Child(("true",), new_session=True)
    for thread in threading.enumerate():
        if thread.name == f"child {child.pid}":
            thread.join()
    os.kill(child.pid, 0)  # raises if another process could have it
    child.kill()
    assert await child.wait() == 0
    child.kill()
    child.input.close()


async def test_a_group_ends_with_its_leader() -> None:
    child = Child(("sh", "-c", "sleep 60 & exit 3"), output=True, new_session=True)
    assert await child.wait() == 3
    async with asyncio.timeout(30):
        with child.output as pipe:
            assert await asyncio.to_thread(pipe.read) == b"", "it is open while a member lives"
    child.input.close()


async def test_a_failed_start_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        Child(("/no/such/program",))
