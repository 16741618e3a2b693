"""How many pieces are on their way: what fills a link, and no more."""

from collections import deque

import pytest

from services.worker.engine.transfer.piece_window import PIECES_MIN, PieceSent, PieceWindow


def rate_over(window: PieceWindow, delay_s: float, piece_s: float, pieces: int = 2000) -> float:
    """Send pieces over a link that carries one in `piece_s` and answers `delay_s` later.

    Returns how much of the link the last half of the pieces used.
    """
    under_way: deque[tuple[float, PieceSent]] = deque()
    now_s = free_s = half_s = 0.0
    for number in range(pieces):
        while len(under_way) >= window.limit:
            now_s, piece = under_way.popleft()
            window.arrive(piece, now_s)
        free_s = max(free_s, now_s) + piece_s
        under_way.append((free_s + delay_s, window.depart(now_s)))
        if number == pieces // 2:
            half_s = now_s
    return (pieces - pieces // 2) * piece_s / (now_s - half_s)


@pytest.mark.parametrize("delay_pieces", [0.1, 1.0, 4.0, 25.0])
def test_a_link_is_full_whatever_its_delay(delay_pieces: float) -> None:
    window = PieceWindow(most=48)
    assert rate_over(window, delay_pieces * 1e-4, 1e-4) > 0.9
    assert window.limit <= 2 + 1.5 * (1 + delay_pieces)


def test_where_more_would_only_queue_there_are_few() -> None:
    window = PieceWindow(most=48)
    rate_over(window, 0.0, 1e-3)
    assert window.limit == PIECES_MIN


def test_it_is_bounded() -> None:
    window = PieceWindow(most=8)
    rate_over(window, 1.0, 1e-4)
    assert window.limit == 8
    assert PieceWindow(most=1).limit == 1
