"""How many moves an exchange has under way at once: by their bytes, for each link."""

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


def test_bytes_count_and_not_requests() -> None:
    assert len(begin(MoveWindow(RATE), "a", 10)) == FIRST_BLOCKS / 10
    assert len(begin(MoveWindow(RATE), "a", FIRST_BLOCKS // 4)) == 4
    assert len(begin(MoveWindow(RATE), "a", 10 * FIRST_BLOCKS)) == MOVES_MIN


def test_each_source_has_a_window_of_its_own() -> None:
    window = MoveWindow(RATE)
    begin(window, "a", 10)
    assert not window.has_room({"a": 1})
    assert window.has_room({"b": 1})
    assert not window.has_room({"a": 1, "b": 1})


def test_a_move_that_ends_makes_room() -> None:
    window = MoveWindow(RATE)
    first, *_ = begin(window, "a", 10)
    window.note_abandoned(first, {"a": 10})
    assert window.has_room({"a": 10})


def test_longer_turns_and_a_faster_link_widen_it() -> None:
    window = MoveWindow(RATE)
    names = begin(window, "a", 10)
    window.note_reserved(names[0], 2 * FIRST_RESERVATION_S)
    more = begin(window, "a", 10, 1.0)
    assert len(more) == len(names)
    for name in names:  # in half the time that the link was said to take
        window.note_arrived(name, {"a": 10}, FIRST_BLOCKS / RATE / 2)
    assert len(begin(window, "a", 10, 2.0)) == 3 * len(names)


def test_shorter_turns_narrow_it() -> None:
    window = MoveWindow(RATE)
    names = begin(window, "a", 10)
    window.note_reserved(names[0], FIRST_RESERVATION_S / 2)
    for name in names[: len(names) // 2]:
        window.note_abandoned(name, {"a": 10})
    assert not window.has_room({"a": 10})
