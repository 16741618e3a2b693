"""Joined frames are split in order, within the limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import frames
from services.common.frames import TAKES_MANY, packed, takes_many, unpacked
from tideserve.worker.v1 import worker_pb2


def aborts(lengths: list[int]) -> list[worker_pb2.GenerateRequest]:
    return [
        worker_pb2.GenerateRequest(abort=worker_pb2.Abort(request_id=f"{number}-" + "x" * length))
        for number, length in enumerate(lengths)
    ]


@given(lengths=st.lists(st.integers(0, 60), max_size=40))
def test_joined_frames_are_split_in_order(lengths: list[int]) -> None:
    wanted = [frame.abort.request_id for frame in aborts(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "FRAMES_MAX", 7)
        patch.setattr(frames, "BYTES_MAX", 200)
        messages = list(packed(aborts(lengths)))
    came = [frame for message in messages for frame in unpacked(message)]
    assert [frame.abort.request_id for frame in came] == wanted
    for message in messages:
        sizes = [frame.abort.ByteSize() for frame in unpacked(message)]
        assert len(sizes) <= 7
        assert len(sizes) == 1 or sum(sizes) <= 200


def test_a_single_frame_is_sent_unwrapped() -> None:
    (message,) = packed(aborts([3]))
    assert message == aborts([3])[0]


def test_large_frames_go_alone() -> None:
    large = frames.UNBATCHED_BYTES
    messages = list(packed(aborts([1, 1, large, 1, large, large, 1, 1])))
    assert [len(list(unpacked(message))) for message in messages] == [2, 1, 1, 1, 1, 2]


def test_support_for_joined_frames_is_announced() -> None:
    assert takes_many(TAKES_MANY)
    assert not takes_many((("tideserve-frames", "one"), ("other", "many")))
    assert not takes_many(None)
