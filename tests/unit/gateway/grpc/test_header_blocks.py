"""Header blocks of HTTP/2: their bound, and the header added to each."""

import random

import pytest

from services.gateway.grpc.header_blocks import (
    BLOCK_BYTES_MAX,
    BLOCK_STEPS,
    FRAME_STEPS,
    BlockTooLarge,
    HeaderBlocks,
    InvalidFrames,
)
from tests.support.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    SETTINGS,
    frame,
)

ADDED = b"\x10\x04name\x05value"
SENT = (
    frame(SETTINGS, 0, 0)
    + frame(HEADERS, END_HEADERS | END_STREAM, 1, b"block")
    + frame(DATA, END_STREAM, 1, b"x" * 300)
    + frame(HEADERS, 0, 3, b"be")
    + frame(CONTINUATION, 0, 3)
    + frame(CONTINUATION, END_HEADERS, 3, b"gun")
    + frame(HEADERS, END_HEADERS, 5)
    + frame(PING, 0, 0, b"8 bytes.")
)
RECEIVED = (
    frame(SETTINGS, 0, 0)
    + frame(HEADERS, END_STREAM, 1, b"block")
    + frame(CONTINUATION, END_HEADERS, 1, ADDED)
    + frame(DATA, END_STREAM, 1, b"x" * 300)
    + frame(HEADERS, 0, 3, b"be")
    + frame(CONTINUATION, 0, 3)
    + frame(CONTINUATION, 0, 3, b"gun")
    + frame(CONTINUATION, END_HEADERS, 3, ADDED)
    + frame(HEADERS, 0, 5)
    + frame(CONTINUATION, END_HEADERS, 5, ADDED)
    + frame(PING, 0, 0, b"8 bytes.")
)


@pytest.mark.parametrize("seed", range(50))
def test_each_block_gets_the_header_with_any_chunking(seed: int) -> None:
    rng = random.Random(seed)
    blocks, received, rest = HeaderBlocks("name", "value"), b"", SENT
    while rest:
        size = len(rest) if seed == 0 else rng.choice((1, 2, 9, 40))
        parts, kept = blocks.feed(rest[:size])
        assert kept == b""
        received += b"".join(parts)
        rest = rest[size:]
    assert received == RECEIVED


@pytest.mark.parametrize("size", [0, 1, 8000])
def test_a_block_is_bounded_with_any_chunking(size: int) -> None:
    blocks = HeaderBlocks("name", "value")
    blocks.feed(frame(HEADERS, 0, 1, b"x" * size))
    part = frame(CONTINUATION, 0, 1, b"x" * size)
    with pytest.raises(BlockTooLarge):
        for _ in range(BLOCK_BYTES_MAX // len(part) + 1):
            blocks.feed(part)


@pytest.mark.parametrize("steps_max", [1, 3, 7])
def test_the_rest_is_kept_when_the_step_limit_is_reached(steps_max: int) -> None:
    blocks, received, rest, rounds = HeaderBlocks("name", "value"), b"", SENT, 0
    while rest:
        before = blocks.steps
        parts, rest = blocks.feed(rest, steps_max)
        assert blocks.steps - before < steps_max + FRAME_STEPS + BLOCK_STEPS
        received += b"".join(parts)
        rounds += 1
    assert received == RECEIVED
    assert blocks.steps == 8 * FRAME_STEPS + 3 * BLOCK_STEPS
    assert rounds > 1


def test_a_block_lasts_until_its_last_byte() -> None:
    blocks = HeaderBlocks("name", "value")
    for stream in (1, 3):
        begun = frame(HEADERS, 0, stream, b"be") + frame(CONTINUATION, END_HEADERS, stream, b"gun")
        for number in range(len(begun)):
            assert bool(blocks.block_stream) == (number >= 9)
            blocks.feed(begun[number : number + 1])
        assert not blocks.block_stream


def test_blocks_of_calls_are_bounded_separately() -> None:
    blocks = HeaderBlocks("name", "value")
    for number in range(100):
        blocks.feed(frame(HEADERS, 0, 2 * number + 1, b"x" * (BLOCK_BYTES_MAX // 2)))
        blocks.feed(frame(CONTINUATION, END_HEADERS, 2 * number + 1, b"x"))


@pytest.mark.parametrize(
    "frames",
    [
        frame(CONTINUATION, END_HEADERS, 1, b"x"),
        frame(HEADERS, 0, 1, b"x") + frame(DATA, 0, 1, b"x"),
        frame(HEADERS, 0, 1, b"x") + frame(HEADERS, 0, 3, b"x"),
        frame(HEADERS, END_HEADERS, 1) + frame(CONTINUATION, 0, 1),
    ],
)
def test_frames_out_of_order_are_refused(frames: bytes) -> None:
    with pytest.raises(InvalidFrames):
        HeaderBlocks("name", "value").feed(frames)
