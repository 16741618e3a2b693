"""Limited log events, and the count of omitted ones."""

from services.common.log_limiter import LOG_INTERVAL_S, SUBJECTS_MAX, LogLimiter


def test_a_key_has_a_line_per_interval_and_the_number_of_omitted_events() -> None:
    now_s = 0.0
    limiter = LogLimiter(lambda: now_s)
    assert limiter.due("a", "x") == "none"
    assert limiter.due("b", "x") == "none"
    now_s = LOG_INTERVAL_S - 1
    assert [limiter.due("a", subject) for subject in "yzzxxx"] == [None] * 6
    now_s = LOG_INTERVAL_S
    assert limiter.due("a", "y") == "6 (3 of x, 2 of z, 1 of y)"
    now_s = 2 * LOG_INTERVAL_S
    assert limiter.due("a", "y") == "none"


def test_subjects_take_bounded_memory() -> None:
    now_s = 0.0
    limiter = LogLimiter(lambda: now_s)
    for number in range(1 + 2 * SUBJECTS_MAX):
        limiter.due("a", str(number))
    now_s = LOG_INTERVAL_S
    line = limiter.due("a")
    assert line is not None and line.startswith(
        f"{2 * SUBJECTS_MAX} ({SUBJECTS_MAX} of others, 1 of "
    )
