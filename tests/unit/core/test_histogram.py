"""Histograms for metrics."""

from services.core.histogram import ITERATION_TOKENS, Histogram, HistogramMeter


def test_values_are_counted_by_bucket() -> None:
    meter = HistogramMeter(ITERATION_TOKENS)
    assert meter.histogram == Histogram((), 0)
    for tokens in (1, 2, 8, 9, 16384, 16385):
        meter.add(tokens)
    histogram = meter.histogram
    assert histogram.total == 1 + 2 + 8 + 9 + 16384 + 16385
    assert len(histogram.counts) == len(ITERATION_TOKENS) + 1
    assert histogram.counts[:3] == (1, 2, 1)  # up to 1, up to 8, up to 16
    assert histogram.counts[-2:] == (1, 1)
