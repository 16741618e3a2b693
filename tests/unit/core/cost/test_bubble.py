"""Bubbles from intervals, and as measured by the stages."""

import pytest

from services.core.cost.bubble import BubbleMeter, StageTime, bubble_share


def test_a_full_pipeline_loses_only_its_ends() -> None:
    count = 9
    first = [(float(k), k + 1.0) for k in range(count)]
    second = [(k + 1.0, k + 2.0) for k in range(count)]
    assert bubble_share([first, second]) == pytest.approx(1 - 18 / 20)


def test_uneven_microbatches_leave_bubbles() -> None:
    first = [(0.0, 1.0), (1.0, 4.0), (4.0, 5.0)]
    second = [(1.0, 2.0), (4.0, 7.0), (7.0, 8.0)]
    assert bubble_share([first, second]) == pytest.approx(1 - 10 / 16)


def test_a_pause_with_nothing_to_run_is_no_bubble() -> None:
    first, second = [(0.0, 1.0), (100.0, 101.0)], [(1.0, 2.0), (101.0, 102.0)]
    assert bubble_share([first, second]) == pytest.approx(0.5)
    assert bubble_share([[(0.0, 5.0)]]) == 0.0
    assert bubble_share([[], []]) == 0.0


def test_stages_measure_a_pause_as_no_bubble() -> None:
    """Two microbatches 99 s apart; each stage has its own clock."""
    leader, follower, ahead_s = BubbleMeter(), BubbleMeter(), 1234.5
    assert leader.note_launch(1, 0.0) == 0.0
    leader.note_run(0.0, 1.0)
    follower.note_run(ahead_s + 1.0, ahead_s + 2.0)
    leader.note_result(1, 2.0)
    assert leader.total == StageTime(pipeline_busy_s=1.0, pipeline_bubble_s=1.0)
    vacant_s = leader.note_launch(2, 101.0)
    assert vacant_s == 99.0
    leader.note_run(101.0, 104.0)
    follower.note_run(ahead_s + 104.0, ahead_s + 107.0, vacant_s)
    leader.note_result(2, 107.0)
    assert leader.total == StageTime(pipeline_busy_s=4.0, pipeline_bubble_s=4.0)
    # It knows nothing of its first wait; 3 s of the other one were the leader's stage.
    assert follower.total == StageTime(pipeline_busy_s=4.0, pipeline_bubble_s=3.0)


def test_a_new_configuration_forgets_microbatches_in_flight() -> None:
    meter = BubbleMeter()
    meter.note_launch(1, 0.0)
    meter.note_run(0.0, 1.0)
    meter.start_configuration()
    meter.note_result(1, 50.0)
    assert meter.note_launch(2, 60.0) == 0.0
    meter.note_run(60.0, 61.0)
    meter.note_result(2, 61.5)
    assert meter.total == StageTime(pipeline_busy_s=2.0, pipeline_bubble_s=0.5)
