"""The window of bytes in flight that fills a link, and the size of pieces."""

from collections import deque
from dataclasses import replace

import pytest

from services.worker.engine.transfer.piece_window import (
    PIECE_S,
    PIECES_MIN,
    PieceSent,
    PieceWindow,
    WindowBounds,
)

PIECE_BYTES = 1000
BOUNDS = WindowBounds(PIECE_BYTES, PIECE_BYTES, pieces_max=48, bytes_max=48 * PIECE_BYTES)
GROWING = replace(BOUNDS, piece_bytes_max=4 * PIECE_BYTES)


def rate_over(window: PieceWindow, delay_s: float, bytes_per_s: float, pieces: int = 2000) -> float:
    """Send pieces over a link of this bandwidth with acknowledgements `delay_s` later. Returns the
    used share of the link for the last half of the pieces.
    """
    under_way: deque[tuple[float, PieceSent]] = deque()
    now_s = free_s = half_s = busy_s = 0.0
    for number in range(pieces):
        while not window.has_room:
            now_s, piece = under_way.popleft()
            window.note_answered(piece, now_s)
        piece_s = window.piece_bytes / bytes_per_s
        free_s = max(free_s, now_s) + piece_s
        under_way.append((free_s + delay_s, window.note_sent(window.piece_bytes, now_s)))
        if number == pieces // 2:
            half_s = now_s
        busy_s += piece_s if number >= pieces // 2 else 0.0
    return busy_s / (now_s - half_s)


@pytest.mark.parametrize("delay_pieces", [0.1, 1.0, 4.0, 25.0])
def test_the_window_fills_a_link_of_any_delay(delay_pieces: float) -> None:
    window = PieceWindow(BOUNDS)
    assert rate_over(window, delay_pieces * 1e-4, 1e4 * PIECE_BYTES) > 0.9
    assert window.limit_bytes <= (2 + 1.5 * (1 + delay_pieces)) * PIECE_BYTES


def test_the_window_stays_small_if_pieces_would_queue() -> None:
    window = PieceWindow(BOUNDS)
    rate_over(window, 0.0, 1e3 * PIECE_BYTES)
    assert window.limit_bytes == PIECES_MIN * PIECE_BYTES


def test_the_window_is_bounded() -> None:
    window = PieceWindow(replace(BOUNDS, bytes_max=8 * PIECE_BYTES))
    rate_over(window, 1.0, 1e4 * PIECE_BYTES)
    assert window.limit_bytes == 8 * PIECE_BYTES
    few = PieceWindow(replace(BOUNDS, pieces_max=3))
    for _ in range(3):
        assert few.has_room
        sent = few.note_sent(1, 0.0)
    assert not few.has_room
    few.forget(sent)
    assert few.has_room


@pytest.mark.parametrize(("pieces", "carried"), [(1, 0.5), (1, 1.0), (2.5, 2.5), (4, 100.0)])
def test_piece_size_follows_the_bandwidth(pieces: float, carried: float) -> None:
    """But no smaller than over a slow link, and not larger than the bound."""
    window = PieceWindow(GROWING)
    used = rate_over(window, 0.0, carried * PIECE_BYTES / PIECE_S)
    assert used > 0.9
    assert window.piece_bytes == pytest.approx(pieces * PIECE_BYTES, rel=0.01)


def test_pieces_grow_with_slow_acknowledgements() -> None:
    window = PieceWindow(GROWING)
    assert rate_over(window, 2e-3, 4 * PIECE_BYTES / PIECE_S) > 0.9
    assert window.piece_bytes == pytest.approx(4 * PIECE_BYTES, rel=0.1)
