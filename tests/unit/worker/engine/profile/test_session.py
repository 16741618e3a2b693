"""Measurements and results of a profiling session."""

from random import Random

import pytest

from services.core.cost.model import Chunks, Coefficients, CostModel
from services.worker.engine.profile.batches import (
    FULL,
    GPU,
    HELD_OUT_KINDS,
    IDLE,
    QUICK,
    BatchLimits,
    Effort,
    fit_batches,
    held_out_batches,
)
from services.worker.engine.profile.session import (
    ROUNDS_MAX,
    ROUNDS_MIN,
    ProfileOutcome,
    ProfileSession,
    repeat_noise,
)

ROOM = BatchLimits(
    max_batch_tokens=256, max_running=128, max_model_len=8192, num_blocks=2000, block_size=16
)
GPU_ROOM = BatchLimits(
    max_batch_tokens=4096, max_running=256, max_model_len=32_768, num_blocks=12_000, block_size=16
)
SMALL = BatchLimits(
    max_batch_tokens=32, max_running=4, max_model_len=300, num_blocks=24, block_size=16
)
DEVICE = CostModel(2e-6, 3e-3, 0.11, 0.1, Coefficients(2e-5, 4e-3, 0.1), 1e-5)


def profiled(effort: Effort, noise: float, seed: int = 0) -> tuple[ProfileSession, ProfileOutcome]:
    rng = Random(seed)
    session = ProfileSession(effort, ROOM, seed)
    while not session.complete:
        exact_s = DEVICE.batch_s(session.next_batch())
        session.record(exact_s * rng.uniform(1 - noise, 1 + noise))
    return session, session.outcome(1.0)


@pytest.mark.parametrize("effort", [FULL, QUICK, IDLE, GPU])
@pytest.mark.parametrize("room", [ROOM, SMALL, GPU_ROOM])
def test_points_fit_and_are_distinct(effort: Effort, room: BatchLimits) -> None:
    kinds = held_out_batches(effort, room, Random(1))
    points = [*fit_batches(effort, room), *(p for some in kinds.values() for p in some)]
    assert all(room.allows(point) for point in points)
    assert len(points) == len(set(points))
    assert {new == 1 for point in points for _, new in point} == {True, False}


def test_held_out_batches_match_their_kind() -> None:
    kinds = held_out_batches(FULL, ROOM, Random(2))
    assert tuple(kinds) == HELD_OUT_KINDS

    def prefilled(point: Chunks) -> list[int]:
        return [prefix for prefix, new in point if new > 1]

    assert all(not any(prefilled(point)) for point in kinds["prefill"])
    assert all(all(prefilled(point)) for point in kinds["prefill after prefix"])
    assert all(not prefilled(point) for point in kinds["decode"])
    assert all(len(prefilled(point)) < len(point) for point in kinds["mixed"])
    assert all(len(points) >= 4 for points in kinds.values())


def test_every_point_runs_once_per_round_in_shuffled_order() -> None:
    session = ProfileSession(QUICK, ROOM)
    _, wanted = session.progress
    size = wanted // ROUNDS_MIN
    orders = []
    for _ in range(ROUNDS_MIN):
        order = []
        for _ in range(size):
            order.append(session.next_batch())
            session.record(10.0)
        orders.append(order)
    assert session.complete
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert len({tuple(order) for order in orders}) == ROUNDS_MIN


def test_an_exact_device_is_predicted_exactly() -> None:
    session, outcome = profiled(QUICK, noise=0.0)
    assert outcome.rounds == ROUNDS_MIN
    assert session.progress[0] == session.progress[1]
    assert outcome.accuracy.error < 1e-6
    assert outcome.accuracy.noise == 0
    assert outcome.passed
    assert outcome.error_max == 0.05


def test_a_fast_device_is_measured_more_often_within_a_limit() -> None:
    session = ProfileSession(QUICK, ROOM)
    while not session.complete:
        session.record(1e-3)
    assert session.outcome(1.0).rounds == ROUNDS_MAX


def test_noise_raises_the_tolerance() -> None:
    _, outcome = profiled(FULL, noise=0.3)
    assert outcome.accuracy.noise > 0.05
    assert outcome.error_max == pytest.approx(1.5 * outcome.accuracy.noise)


def test_a_device_of_another_shape_does_not_pass() -> None:
    session = ProfileSession(QUICK, ROOM)
    while not session.complete:
        tokens = sum(new for _, new in session.next_batch())
        session.record(1.0 if tokens < 50 else 0.05)
    assert not session.outcome(1.0).passed


def test_a_steady_background_load_is_detected_without_noise() -> None:
    session, outcome = profiled(QUICK, noise=0.0)
    assert outcome.quiet and not outcome.crowded
    crowded = session.outcome(0.5)
    assert crowded.quiet and crowded.crowded


def test_repeat_noise_is_the_spread_of_repeated_batches() -> None:
    assert repeat_noise([[2.0, 1.0, 2.0, 1.0, 2.0]]) == pytest.approx(0.5)
    assert repeat_noise([[1.0] * 5, [2.0] * 5]) == 0
