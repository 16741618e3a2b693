import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.transfer.errors import ChecksumMismatch, FrameError
from services.worker.engine.transfer.frame import (
    ALIGNMENT_BYTES,
    ROOM_BYTES,
    Frame,
    FrameCodec,
    PayloadRoom,
    as_bytes,
)
from tests.support.transfer import CODEC, Note, bytes_of

names = st.text(max_size=60)
numbers = st.integers(0, 2**64 - 1)


@given(names, numbers, names, names, numbers, st.text(max_size=500), st.binary(max_size=2000))
def test_a_frame_round_trips(
    group: str, epoch: int, sender: str, incarnation: str, sequence: int, text: str, payload: bytes
) -> None:
    frame = Frame(group, epoch, Note(text), payload).stamped(sender, incarnation, sequence)
    back = CODEC.decode(CODEC.encode(frame))
    back.verify()
    assert (back.group_id, back.epoch, back.header) == (group, epoch, Note(text))
    assert (back.sender, back.incarnation, back.sequence) == (sender, incarnation, sequence)
    assert back.payload.tobytes() == payload


def test_a_payload_may_be_a_tensor_and_is_copied() -> None:
    tensor = torch.arange(100, dtype=torch.float32)
    encoded = CODEC.encode(Frame("g", 1, Note(""), tensor.view(torch.uint8)))
    tensor.zero_()
    back = CODEC.decode(encoded)
    assert torch.equal(torch.from_numpy(back.payload).view(torch.float32), torch.arange(100.0))


@given(names, names, st.text(max_size=6000), st.binary(max_size=200))
def test_a_payload_in_a_room_makes_the_same_frame(
    group: str, sender: str, text: str, payload: bytes
) -> None:
    room = PayloadRoom(np.empty(ROOM_BYTES + len(payload), np.uint8))
    room.payload[:] = np.frombuffer(payload, np.uint8)
    frame = Frame(group, 1, Note(text), payload).stamped(sender, "", 5)
    encoded = CODEC.encode(frame)
    for _ in range(2):  # the lane may have been full
        assert np.array_equal(CODEC.encode(replace(frame, payload=room)), encoded)


def test_a_payload_in_a_room_is_not_copied() -> None:
    room = PayloadRoom(np.empty(ROOM_BYTES + 1000, np.uint8))
    encoded = CODEC.encode(Frame("g", 1, Note("x" * 1000), room))
    assert np.shares_memory(encoded, room.payload)
    front_too_long = CODEC.encode(Frame("g", 1, Note("x" * ROOM_BYTES), room))
    assert not np.shares_memory(front_too_long, room.payload)


def test_a_payload_is_aligned_within_the_frame() -> None:
    for length in range(130):
        encoded = CODEC.encode(Frame("g", 1, Note("x" * length), b"payload"))
        assert (encoded.size - len(b"payload")) % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("payload", [np.zeros(3), np.zeros((4, 4), np.uint8)[:, ::2]])
def test_a_non_contiguous_payload_is_refused(payload: np.ndarray) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        as_bytes(payload)


def test_unencodable_values_are_refused() -> None:
    class Stranger(msgspec.Struct, tag=99):
        pass

    for frame in (
        Frame("g", 1, Stranger()),
        Frame("g", -1, Note("")),
        Frame("g", 2**64, Note("")),
        Frame("g" * 256, 1, Note("")),
        Frame("g", 1, Note("x" * (17 << 20))),
    ):
        with pytest.raises(ValueError):
            CODEC.encode(frame)


@pytest.mark.parametrize("number", [-1, 1 << 16])
def test_kinds_need_numbers_that_fit_the_envelope(number: int) -> None:
    with pytest.raises(ValueError, match="needs a number"):
        FrameCodec({number: Note})


def test_a_kind_that_only_the_sender_knows_is_refused() -> None:
    encoded = CODEC.encode(Frame("g", 1, Note("")))
    with pytest.raises(FrameError, match="kind 1 "):
        FrameCodec({}).decode(encoded)


@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        CODEC.decode(np.frombuffer(garbage, np.uint8))


def test_every_flipped_bit_is_detected() -> None:
    whole = CODEC.encode(Frame("group", 3, Note("header"), b"payload").stamped("w", "i", 5))
    for position in range(whole.size * 8):
        damaged = whole.copy()
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(FrameError):
            CODEC.decode(damaged).verify()


def test_damage_of_the_payload_is_a_checksum_mismatch() -> None:
    encoded = CODEC.encode(Frame("g", 1, Note(""), bytes_of(100)))
    encoded[-1] ^= 0x80
    frame = CODEC.decode(encoded)
    with pytest.raises(ChecksumMismatch):
        frame.verify()


@pytest.mark.parametrize("seed", range(5))
def test_frames_with_random_damage_never_crash(seed: int) -> None:
    rng = random.Random(seed)
    whole = CODEC.encode(Frame("group", 3, Note("header"), bytes_of(200)).stamped("w", "i", 5))
    for _ in range(400):
        damaged = whole.copy()
        for _ in range(rng.randrange(1, 8)):
            damaged[rng.randrange(damaged.size)] = rng.randrange(256)
        damaged = damaged[: rng.randrange(damaged.size + 1)]
        try:
            CODEC.decode(damaged).verify()
        except FrameError:
            continue
        assert np.array_equal(damaged, whole)
