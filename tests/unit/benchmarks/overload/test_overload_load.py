"""The load of `overload`: its rate, its classes and its targets."""

import pytest

from benchmarks.overload.load import FACTORS, INTERACTIVE, class_shares, mean_tokens, targets_for
from benchmarks.overload.trial import Load
from tideserve.load.workload import BATCH_CLASS, DEFAULT_CLASS

CAPACITY_TOKENS_S = 6000.0


@pytest.mark.parametrize("factor", FACTORS)
def test_the_offered_tokens_are_a_multiple_of_the_capacity(factor: int) -> None:
    load = Load.drawn(factor, CAPACITY_TOKENS_S, 30.0, targets_for(4.0, mixed=False), "0")
    offered = mean_tokens(load.requests) * len(load.requests) / load.seconds
    assert offered == pytest.approx(factor * CAPACITY_TOKENS_S, rel=0.12)
    assert load.requests[0].arrival_s == 0.0
    assert all(request.arrival_s < load.seconds for request in load.requests)
    interactive = [r for r in load.requests if r.slo_class == INTERACTIVE]
    tokens = mean_tokens(interactive) * len(interactive) / load.seconds
    assert tokens == pytest.approx(CAPACITY_TOKENS_S / 2, rel=0.2)


def test_prompts_share_no_prefixes() -> None:
    load = Load.drawn(2, CAPACITY_TOKENS_S, 20.0, targets_for(4.0, mixed=False), "0")
    beginnings = {request.prompt_ids[:8] for request in load.requests}
    assert len(beginnings) == len(load.requests)


def test_half_of_the_mixed_load_is_batch_work() -> None:
    shares = class_shares(10, mixed=True)
    assert shares == {INTERACTIVE: 0.05, DEFAULT_CLASS: pytest.approx(0.45), BATCH_CLASS: 0.5}
    assert class_shares(1, mixed=False)[BATCH_CLASS] == 0


def test_requests_carry_the_stated_targets_of_their_class() -> None:
    for mixed, standard_s in ((False, 4.0), (True, None)):
        load = Load.drawn(10, CAPACITY_TOKENS_S, 10.0, targets_for(4.0, mixed=mixed), "0")
        stated = {(r.slo_class, r.ttft_s, r.tpot_s) for r in load.requests}
        expected = {(INTERACTIVE, 2.0, 0.4), (DEFAULT_CLASS, standard_s, None)}
        assert stated == expected | ({(BATCH_CLASS, None, None)} if mixed else set())
