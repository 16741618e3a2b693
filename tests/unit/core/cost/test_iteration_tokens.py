"""A histogram of what iterations ran."""

from services.core.cost.iteration_tokens import (
    UPPER_BOUNDS,
    IterationTokenMeter,
    IterationTokens,
)


def test_iterations_are_counted_by_their_tokens() -> None:
    meter = IterationTokenMeter()
    for tokens in (1, 2, 8, 9, 16384, 16385):
        meter.add(tokens)
    total = meter.total
    assert total.tokens == 1 + 2 + 8 + 9 + 16384 + 16385
    assert len(total.counts) == len(UPPER_BOUNDS) + 1
    assert total.counts[:3] == (1, 2, 1)  # up to 1, up to 8, up to 16
    assert total.counts[-2:] == (1, 1)
    assert IterationTokenMeter().total == IterationTokens((0,) * (len(UPPER_BOUNDS) + 1), 0)
