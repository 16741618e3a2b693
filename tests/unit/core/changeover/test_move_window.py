"""The window of concurrent moves of an exchange, in bytes for each link."""

from services.core.changeover.move_window import (
    FIRST_RESERVATION_S,
    MOVES_MIN,
    RESERVATIONS,
    MoveWindow,
)

RATE = 1000.0
FIRST_BLOCKS = int(RESERVATIONS * FIRST_RESERVATION_S * RATE)


def begin(window: MoveWindow, source: str, blocks: int, now_s: float = 0.0) -> list[str]:
    """Begin moves of one size from a source while there is room; returns their names."""
    names: list[str] = []
    while window.has_room({source: blocks}):
        names.append(f"{source}{now_s}/{len(names)}")
        window.note_started(names[-1], {source: blocks}, now_s)
    return names


def test_the_window_is_counted_in_bytes() -> None:
    assert len(begin(MoveWindow(RATE), "a", 10)) == FIRST_BLOCKS / 10
    assert len(begin(MoveWindow(RATE), "a", FIRST_BLOCKS // 4)) == 4
    assert len(begin(MoveWindow(RATE), "a", 10 * FIRST_BLOCKS)) == MOVES_MIN


def test_each_source_has_its_own_window() -> None:
    window = MoveWindow(RATE)
    begin(window, "a", 10)
    assert not window.has_room({"a": 1})
    assert window.has_room({"b": 1})
    assert not window.has_room({"a": 1, "b": 1})


def test_a_completed_move_frees_its_window() -> None:
    window = MoveWindow(RATE)
    first, *_ = begin(window, "a", 10)
    window.note_abandoned(first, {"a": 10})
    assert window.has_room({"a": 10})


def test_the_window_grows_with_longer_turns_and_bandwidth() -> None:
    window = MoveWindow(RATE)
    names = begin(window, "a", 10)
    window.note_reserved(names[0], 2 * FIRST_RESERVATION_S)
    more = begin(window, "a", 10, 1.0)
    assert len(more) == len(names)
    for name in names:  # in half the time that the link was said to take
        window.note_arrived(name, {"a": 10}, FIRST_BLOCKS / RATE / 2)
    assert len(begin(window, "a", 10, 2.0)) == 3 * len(names)


def test_the_window_shrinks_with_shorter_turns() -> None:
    window = MoveWindow(RATE)
    names = begin(window, "a", 10)
    window.note_reserved(names[0], FIRST_RESERVATION_S / 2)
    for name in names[: len(names) // 2]:
        window.note_abandoned(name, {"a": 10})
    assert not window.has_room({"a": 10})
