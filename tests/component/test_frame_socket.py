"""Frames over a connection all arrive in order."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
import zmq

from services.common.timeouts import timeout
from services.worker.frame_socket import FrameSocket

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
Trial = Callable[[FrameSocket, FrameSocket], Awaitable[None]]


def address_in(folder: Path) -> str:
    return f"ipc://{folder}/x"


def connected(
    loop: Callable[[], asyncio.AbstractEventLoop], path: Path, trial: Trial, met: bool = True
) -> None:
    """Run a trial with both ends of a connection, connected in advance if `met`."""

    async def run() -> None:
        ends = FrameSocket(zmq.PAIR, 1000), FrameSocket(zmq.PAIR, 1000)
        ends[0].bind(address_in(path))
        if met:
            ends[1].connect(address_in(path))
        try:
            async with timeout(30):
                await trial(*ends)
        finally:
            for end in ends:
                end.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop", LOOPS)
def test_frames_flow_both_ways_concurrently(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    frames = [b"%d" % number for number in range(5000)]

    async def trial(first: FrameSocket, other: FrameSocket) -> None:
        async def send(end: FrameSocket) -> None:
            for frame in frames:
                await end.send(frame)

        async def take(end: FrameSocket) -> None:
            assert [await end.recv() for _ in frames] == frames

        await asyncio.gather(send(first), send(other), take(first), take(other))

    connected(loop, tmp_path, trial)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cancelled_read_loses_no_frame(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    async def trial(first: FrameSocket, other: FrameSocket) -> None:
        for number in range(50):
            reader = asyncio.create_task(other.recv())
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
            await first.send(b"%d" % number)
            assert await other.recv() == b"%d" % number

    connected(loop, tmp_path, trial)


@pytest.mark.parametrize("loop", LOOPS)
def test_frames_that_wait_for_buffer_space_keep_their_order(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    async def trial(first: FrameSocket, other: FrameSocket) -> None:
        frames = [b"%d" % number for number in range(100)]
        sends = [asyncio.create_task(first.send(frame)) for frame in frames]
        await asyncio.sleep(0)
        assert not any(send.done() for send in sends)  # no peer is connected
        other.connect(address_in(tmp_path))
        assert [await other.recv() for _ in sends] == frames
        await asyncio.gather(*sends)

    connected(loop, tmp_path, trial, met=False)


@pytest.mark.parametrize("loop", LOOPS)
def test_closing_ends_waiting_calls(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    async def trial(first: FrameSocket, other: FrameSocket) -> None:
        reader = asyncio.create_task(other.recv())
        await asyncio.sleep(0.01)
        other.close()
        await asyncio.wait([reader])
        assert reader.cancelled()
        alone = FrameSocket(zmq.PAIR, 1)
        sender = asyncio.create_task(alone.send(b"unread"))
        await asyncio.sleep(0.01)
        alone.close()
        sender.cancel()
        await asyncio.wait([sender])
        assert sender.cancelled()

    connected(loop, tmp_path, trial)
