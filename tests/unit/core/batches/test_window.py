"""Lines are claimed at the rate of assignments, and more slowly after refusals."""

import random

from services.core.batches.window import CAUTION_S, QUEUED_MAX, QUEUED_MIN, ClaimWindow


def test_the_queue_follows_the_rate_of_assignments() -> None:
    window = ClaimWindow(2048)
    assert window.room(0, 0, 0.0) == QUEUED_MIN and window.room(QUEUED_MIN, 0, 0.0) == 0
    for number in range(20):
        window.note_placed(number / 20)
    assert window.room(0, 20, 1.0) == 40
    assert window.room(0, 20, 6.1) == QUEUED_MIN, "assignments of more than 5 s ago do not count"
    for _ in range(1000):
        window.note_placed(7.0)
    assert window.room(0, 0, 7.0) == QUEUED_MAX


def test_the_window_bounds_all_lines() -> None:
    window = ClaimWindow(20)
    assert window.room(4, 10, 0.0) == 6
    assert window.room(4, 17, 0.0) == 0


def test_a_refusal_pauses_and_shrinks_the_window() -> None:
    window = ClaimWindow(2048)
    for _ in range(8):
        window.note_refused(10.0, 2.0)
    assert window.room(0, 0, 11.9) == 0
    assert window.room(0, 0, 12.0) == QUEUED_MIN // 2, "refusals at once count as one"
    window.note_refused(13.0, 2.0)
    assert window.room(0, 0, 15.0) == QUEUED_MIN // 4
    assert window.room(0, 0, 15.0 + CAUTION_S) == QUEUED_MIN
    window.note_refused(100.0, 2.0)
    assert window.room(0, 0, 102.0) == QUEUED_MIN // 2


def test_the_window_has_room_for_a_line_after_a_pause() -> None:
    draw = random.Random(1)
    window = ClaimWindow(2048)
    now_s = 0.0
    for _ in range(2000):
        now_s += draw.random()
        draw.choice([window.note_placed, lambda at_s: window.note_refused(at_s, draw.random())])(
            now_s
        )
        window.check_invariants()
        assert 0 <= window.room(0, 0, now_s) <= QUEUED_MAX
    assert window.room(0, 0, now_s + 1.0) >= 1
