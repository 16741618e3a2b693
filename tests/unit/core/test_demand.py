"""Demand changes that are reported to the memory manager at once."""

import pytest

from services.core.demand import ModelDemand, is_urgent_change

TOLD = (ModelDemand("m", 2, 200, arriving_tokens_per_s=100.0), ModelDemand("n", refused=1))


@pytest.mark.parametrize(
    ("now", "news"),
    [
        (TOLD, False),
        (TOLD[::-1], False),
        ((ModelDemand("m", 2, 200, arriving_tokens_per_s=109.0), TOLD[1]), False),
        ((ModelDemand("m", 2, 200, arriving_tokens_per_s=111.0), TOLD[1]), True),
        ((ModelDemand("m", 2, 200), TOLD[1]), False),
        ((ModelDemand("m", 3, 200, arriving_tokens_per_s=100.0), TOLD[1]), True),
        ((ModelDemand("m", 2, 200, 0, 0, 100.0, batch_queued=1), TOLD[1]), True),
        ((*TOLD, ModelDemand("o", arriving_tokens_per_s=1.0)), True),
        (TOLD[:1], True),
        (TOLD[1:], True),
    ],
)
def test_added_requests_are_news_and_a_falling_rate_is_not(
    now: tuple[ModelDemand, ...], news: bool
) -> None:
    assert is_urgent_change(TOLD, now) is news


def test_an_excess_rate_alone_is_not_news() -> None:
    assert not is_urgent_change((ModelDemand("m", arriving_tokens_per_s=5.0),), ())
    assert is_urgent_change((), (ModelDemand("m", arriving_tokens_per_s=5.0),))


def test_the_larger_first_request_counts() -> None:
    first, second = (ModelDemand("m", 1, 50, first_queued_tokens=tokens) for tokens in (30, 50))
    assert first.plus(second) == ModelDemand("m", 2, 100, first_queued_tokens=50)


def test_the_mix_of_a_load_is_no_news_and_the_tightest_target_counts() -> None:
    reported = ModelDemand("m", 1, prompt_tokens_per_s=10.0, output_tokens_per_s=5.0, tpot_s=0.2)
    now = ModelDemand("m", 1, prompt_tokens_per_s=900.0, output_tokens_per_s=1.0, tpot_s=0.1)
    assert not is_urgent_change([reported], [now])
    both = reported.plus(now)
    assert (both.prompt_tokens_per_s, both.output_tokens_per_s) == (910.0, 6.0)
    assert both.tpot_s == 0.1
    assert reported.plus(ModelDemand("m")).tpot_s == ModelDemand("m").plus(reported).tpot_s == 0.2
