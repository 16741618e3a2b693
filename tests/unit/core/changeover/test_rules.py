"""Each rule of a change-over is needed: without it, a run or a scenario goes wrong."""

from functools import partial

import pytest

from tests.support.changeover_rules import RULES
from tests.support.changeover_witnesses import WITNESSES
from tests.support.changeover_world import explore

SEEDS = {
    "frames of other epochs have no effect": 0,
    "frames wait until all stages have joined": 6,
    "a sequence is held until its KV is whole": 4,
    "a preparation begins when all is settled": 8,
    "names of released requests go before blocks": 1,
    "an abort waits while stages join": 9,
    "departed KV stays until it is freed": 4,
    "a new leader counts what is in use": 4,
    "blocks move below the limit first": 0,
}
"""For a rule, a run of the world of change-overs that goes wrong without it."""
SHOWN = {rule: partial(explore, seed) for rule, seed in SEEDS.items()} | WITNESSES


def test_each_rule_has_a_run_or_a_scenario() -> None:
    assert SHOWN.keys() == RULES.keys()


@pytest.mark.parametrize("rule", SHOWN)
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SHOWN[rule]()
    RULES[rule](monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        SHOWN[rule]()
