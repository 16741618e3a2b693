"""The check of predicted times fails without data."""

import sys
from pathlib import Path

import prediction_error
import pytest

from services.common.event_log import EventLog
from services.core.changeover.state import MemberConfig
from services.core.cost.model import CostModel
from services.core.planner.batch import Batch, Chunk, Microbatch
from services.core.planner.config import IterationConfig
from services.core.planner.events import IterationFinished, Planned

PLANNED = Planned(0.0, Microbatch(1, Batch((Chunk("a", 0, (1, 1), (0,), None),))))
SECOND = CostModel(alpha=0.0, beta=0.5, gamma=0.0, lam=0.0)
"""Predicts a second for `PLANNED`."""


def write_log(folder: Path, name: str, iterations_s: list[float]) -> None:
    """A worker's log of iterations without a pause, which took `iterations_s`."""
    config = IterationConfig(num_blocks=8, cost_model=SECOND)
    log = EventLog(folder, name, MemberConfig(name, 2, tied_embeddings=False, planner=config))
    now_s = 0.0
    for seconds in iterations_s:
        log.append("batch", [PLANNED])
        now_s += seconds
        log.append("event", [IterationFinished(now_s, {})])
    log.close()


def status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["prediction_error.py", str(folder)])
    return prediction_error.main()


@pytest.mark.parametrize(
    ("iterations_s", "expected"), [([1.0] * 90, 0), ([1.0] * 62 + [2.0] * 100, 1)]
)
def test_the_exit_status_follows_the_medians(
    iterations_s: list[float], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path, "worker-0", iterations_s)
    assert status(tmp_path, monkeypatch) == expected


def test_a_folder_without_logs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(tmp_path, monkeypatch) == 2
    assert "no event log of a worker" in capsys.readouterr().err


@pytest.mark.parametrize("iterations", [0, 60])
def test_a_log_of_less_than_a_minute_is_an_error_also_beside_a_longer_log(
    iterations: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_log(tmp_path, "worker-0", [1.0] * 90)
    write_log(tmp_path, "worker-1", [1.0] * iterations)
    assert status(tmp_path, monkeypatch) == 2
    assert "worker-1" in capsys.readouterr().err
