"""Frames queued for a peer are bounded in number and in bytes."""

import asyncio

import pytest

from services.gateway.cluster import outbox as module
from services.gateway.cluster.outbox import Outbox
from services.gateway.vocabulary.errors import QueueFull
from tideserve.worker.v1 import worker_pb2

Frame = worker_pb2.GenerateRequest


def abort(number: int, size: int = 0) -> Frame:
    return Frame(abort=worker_pb2.Abort(request_id=f"{number:04}" + "x" * size))


async def test_frames_are_taken_in_order_singly_or_together() -> None:
    outbox: Outbox[Frame] = Outbox()
    for number in range(5):
        outbox.put(abort(number))
    frames, _ = await outbox.take(lambda: False)
    assert frames == [abort(0)]
    frames, size_bytes = await outbox.take(lambda: True)
    assert frames == [abort(number) for number in range(1, 5)]
    assert size_bytes == sum(frame.ByteSize() for frame in frames)
    waiting = asyncio.create_task(outbox.take(lambda: True))
    await asyncio.sleep(0)
    outbox.put(abort(9))
    assert (await waiting)[0] == [abort(9)]


async def test_an_outbox_is_full_at_its_frame_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAMES_MAX", 3)
    outbox: Outbox[Frame] = Outbox()
    for number in range(3):
        assert not outbox.full
        outbox.put(abort(number))
    assert outbox.full


async def test_requests_wait_until_queued_frames_are_written() -> None:
    outbox: Outbox[Frame] = Outbox(bytes_max=1000)
    began: list[int] = []
    held = []

    async def start(number: int) -> None:
        async with outbox.room():
            began.append(number)
            outbox.put(abort(number, 600))

    tasks = [asyncio.create_task(start(number)) for number in range(6)]
    for left in ([0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]):
        for _ in range(20):
            await asyncio.sleep(0)
        assert began == left, "too full by one frame at most"
        frames, size_bytes = await outbox.take(lambda: True)
        held.append(len(frames))
        for _ in range(20):
            await asyncio.sleep(0)
        assert began == left, "what is being written still counts"
        outbox.release(size_bytes)
    await asyncio.gather(*tasks)
    assert held == [2, 2, 2]


async def test_a_request_without_room_times_out_and_blocks_no_other() -> None:
    outbox: Outbox[Frame] = Outbox(bytes_max=1, room_timeout_s=0.05)
    outbox.put(abort(0))
    for _ in range(2):
        with pytest.raises(QueueFull, match="too slowly"):
            async with outbox.room():
                pass
    _, size_bytes = await outbox.take(lambda: True)
    outbox.release(size_bytes)
    async with outbox.room():
        pass


async def test_requests_do_not_wait_for_a_lost_peer() -> None:
    outbox: Outbox[Frame] = Outbox(bytes_max=1)
    outbox.put(abort(0))

    async def wait() -> None:
        async with outbox.room():
            pass

    waiting = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    outbox.close()
    await asyncio.gather(*waiting)
