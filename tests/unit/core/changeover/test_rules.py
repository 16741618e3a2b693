"""Each rule of a change-over is needed: without it, a scenario fails."""

import pytest

from tests.support.changeover_rules import RULES
from tests.support.changeover_witnesses import WITNESSES


def test_each_rule_has_a_scenario() -> None:
    assert WITNESSES.keys() == RULES.keys()


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WITNESSES[rule]()
    RULES[rule](monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        WITNESSES[rule]()
