"""Correction of predicted hits by measured ones."""

import pytest

from services.core.scheduler.prefix_ranking import (
    HALVING_PERIOD,
    LEEWAY,
    WITHOUT_LOOKUP_MAX,
    HitCorrection,
)


def served(
    trust: HitCorrection, requests: int, predicted: int, reported: int, queries: int = 0
) -> int:
    """Prompts of 1,000 tokens with this number of predicted and of reported hit tokens."""
    for _ in range(requests):
        trust.note_sent(1000, predicted)
        queries += 1000
        trust.note_reported(queries, queries * reported // 1000)
    return queries


def test_predictions_are_trusted_at_first() -> None:
    trust = HitCorrection()
    assert trust.factor == 1
    trust.note_reported(5000, 0)  # of what ran before
    trust.note_sent(1000, 800)
    assert trust.factor == 1


def test_accurate_and_exceeded_predictions_are_trusted() -> None:
    for reported in (600, 900):
        trust = HitCorrection()
        served(trust, 50, 600, reported)
        assert trust.factor == 1


def test_half_of_the_predicted_hits_halve_the_correction() -> None:
    trust = HitCorrection()
    served(trust, 50, 800, 400)
    assert trust.factor == pytest.approx((0.4 + LEEWAY) / (0.8 + LEEWAY), rel=0.05)


def test_the_correction_recovers_with_the_hits() -> None:
    trust = HitCorrection()
    queries = served(trust, 3 * HALVING_PERIOD, 800, 0)
    low = trust.factor
    for turn in range(4 * HALVING_PERIOD):
        trust.note_sent(1000, 800)
        trust.note_reported(queries + 1000 * (turn + 1), 800 * (turn + 1))
    assert low < 0.1 and trust.factor > 0.9


def test_predictions_of_a_worker_without_a_cache_are_not_trusted() -> None:
    trust = HitCorrection()
    for _ in range(WITHOUT_LOOKUP_MAX):
        assert trust.factor == 1
        trust.note_sent(1000, 500)
        trust.note_reported(0, 0)
    assert trust.factor == 0
    trust.note_reported(1000, 500)
    assert trust.factor > 0


def test_reset_counters_reset_the_correction() -> None:
    trust = HitCorrection()
    served(trust, 40, 500, 500)
    trust.note_reported(0, 0)
    trust.note_sent(1000, 500)
    trust.note_reported(1000, 500)
    assert trust.factor == pytest.approx(1, abs=0.02)
