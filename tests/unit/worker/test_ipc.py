"""Frames between servicer and engine round trip."""

import pytest

from services.core.cost.bubble import StageTime
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.report import EngineReport, Load
from services.core.request import FinishReason
from services.worker.ipc import (
    AbortAttempt,
    AdoptedRequest,
    ApplyConfiguration,
    GroupPlan,
    Lane,
    MemberPlan,
    MovedRequest,
    Prepare,
    Prepared,
    Progress,
    encode,
    from_engine_decoder,
    to_engine_decoder,
)

MEMBERS = [
    MemberPlan("w0", "a", 0, 2, Lane("h:1", "n1"), Lane("h:2", "n2"), "h:3"),
    MemberPlan("w1", "b", 2, 4, Lane("i:1", "n3"), Lane("i:2", "n4"), "i:3"),
]


@pytest.mark.parametrize(
    "frame",
    [
        ApplyConfiguration([GroupPlan("g", 7, MEMBERS)]),
        Prepare("attempt", [GroupPlan("g", 7, MEMBERS)]),
        AbortAttempt("attempt"),
    ],
)
def test_frames_to_the_engine_round_trip(frame) -> None:
    assert to_engine_decoder.decode(encode(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [
        Prepared("attempt"),
        Prepared("attempt", "no room"),
        Progress([], [], [], EngineReport(Load(0, 0, 1, 0))),
        Progress(
            ["a"],
            [EmitToken("a", 0, 1, FinishReason.STOP)],
            [RefuseRequest("b", "no")],
            EngineReport(Load(1, 2, 3, 4, 5), 7, True, 99, StageTime(1.5, 0.5)),
            [AdoptedRequest("c", "g", 7, [1, 2])],
            [MovedRequest("d", "w1", "i:3", "g", 7, 4)],
        ),
    ],
)
def test_frames_from_the_engine_round_trip(frame) -> None:
    assert from_engine_decoder.decode(encode(frame)) == frame
