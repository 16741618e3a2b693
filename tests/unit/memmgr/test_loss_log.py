"""A loss is a single warning, though all members and many attempts report it."""

import logging

import grpc
import grpc.aio
import pytest

from services.core.groups.vocabulary import Group, GroupPhase, PrepareMembers, Source
from services.memmgr.losses import LossLog
from services.memmgr.member_client import reason_of


@pytest.fixture
def losses(caplog: pytest.LogCaptureFixture) -> LossLog:
    caplog.set_level("INFO", "services.memmgr.losses")
    return LossLog()


def attempt(name: str, epoch: int, *group_ids: str) -> PrepareMembers:
    """An attempt to change these groups."""
    groups = [Group(group_id, epoch, GroupPhase.DEGRADED, (), "tiny") for group_id in group_ids]
    return PrepareMembers(name, 7, tuple(Source(group, 3) for group in groups), (), 5.0)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_loss_is_logged_as_a_single_warning(
    losses: LossLog, caplog: pytest.LogCaptureFixture
) -> None:
    for worker_id in ("w0", "w2", "w0", "w1"):  # each repeats it with every report
        losses.note_trouble(worker_id, "g0", 4, "the connection to w3 is lost")
    for name in ("1-1", "1-2"):
        losses.note_attempt(attempt(name, 4, "g0"))
        losses.note_failed(name, "w3 refused: it is unreachable")
    assert warnings(caplog) == ["w0 at epoch 4: the connection to w3 is lost"]
    assert [record.getMessage() for record in caplog.records][1:] == [
        "w2 at epoch 4: the connection to w3 is lost",
        "w1 at epoch 4: the connection to w3 is lost",
        "attempt 1-1 failed: w3 refused: it is unreachable",
        "attempt 1-2 failed: w3 refused: it is unreachable",
    ]


def test_another_loss_is_a_new_warning(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    losses.note_trouble("w0", "g0", 4, "the connection to w3 is lost")
    losses.note_trouble("w4", "g4", 4, "the connection to w5 is lost")
    losses.note_trouble("w0", "g0", 5, "the connection to w1 is lost")
    assert len(warnings(caplog)) == 3


def test_attempts_at_an_unannounced_group_are_a_single_warning(
    losses: LossLog, caplog: pytest.LogCaptureFixture
) -> None:
    """A single worker is lost: no member is left to report it."""
    for name in ("1-1", "1-2", "1-3"):
        losses.note_attempt(attempt(name, 5, "g3"))
        losses.note_failed(name, "w3 refused: it is unreachable")
    assert warnings(caplog) == ["attempt 1-1 failed: w3 refused: it is unreachable"]
    losses.note_attempt(attempt("1-4", 5, "g3", "g4"))
    losses.note_failed("1-4", "w4 refused: no room")
    assert warnings(caplog)[1:] == ["attempt 1-4 failed: w4 refused: no room"]


def test_an_unknown_attempt_is_a_warning(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    losses.note_failed("1-1", "w3 has left or was restarted")
    losses.note_failed("1-2", "w3 has left or was restarted")
    assert len(warnings(caplog)) == 2


def test_removed_groups_are_forgotten(losses: LossLog, caplog: pytest.LogCaptureFixture) -> None:
    losses.note_trouble("w0", "g0", 4, "the connection to w3 is lost")
    losses.keep_only(["w0"], ["g0"])
    losses.note_trouble("w0", "g0", 4, "the connection to w3 is lost")
    assert len(caplog.records) == 1
    losses.keep_only([], [])
    losses.note_trouble("w0", "g0", 4, "the connection to w3 is lost")
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: refused",
            "it is unreachable",
        ),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "it did not answer in time"),
        (
            grpc.StatusCode.UNAVAILABLE,
            "the worker starts; try again",
            "the worker starts; try again",
        ),
        (grpc.StatusCode.FAILED_PRECONDITION, "it has no room", "it has no room"),
        (grpc.StatusCode.INTERNAL, "", "INTERNAL"),
    ],
)
def test_a_silent_member_is_described_in_words(
    code: grpc.StatusCode, details: str, reason: str
) -> None:
    none = grpc.aio.Metadata()
    assert reason_of(grpc.aio.AioRpcError(code, none, none, details)) == reason
