import pytest

from services.core.iteration.bubble import bubble_share


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
