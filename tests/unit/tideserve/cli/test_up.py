"""What `up` derives before it starts anything."""

from typing import Any

import pytest

from tideserve.cli.host import unused_variables
from tideserve.cli.up import DRAINING, drain_time_s


@pytest.mark.parametrize(
    ("kind", "section", "drain_s"),
    [
        ("gateway", {}, 10.0),
        ("gateway", {"drain_delay_s": 5, "drain_timeout_s": 60}, 65.0),
        ("worker", {}, 30.0),
        ("worker", {"drain_timeout_s": 600}, 600.0),
        ("worker", {"drain_timeout_s": 0}, 0.0),
        ("worker", {"drain_timeout_s": "long"}, 30.0),
    ],
)
def test_a_service_is_given_the_time_that_it_drains(
    kind: str, section: dict[str, Any], drain_s: float
) -> None:
    assert drain_time_s(DRAINING[kind], section) == drain_s


def test_options_in_the_environment_are_not_ignored_in_silence() -> None:
    (sentence,) = unused_variables({"TIDESERVE__PORT": "1", "TIDESERVE_URL": "u"})
    assert sentence.startswith("TIDESERVE__PORT: ")
    assert unused_variables({"TIDESERVE_URL": "u", "HOME": "/"}) == []
