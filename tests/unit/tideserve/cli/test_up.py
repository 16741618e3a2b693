"""What `up` derives before it starts anything."""

import io
from typing import Any

import pytest

from tideserve.cli.host import unused_variables
from tideserve.cli.report import Report
from tideserve.cli.up import DRAINING, Missing, drain_time_s, missing_of


@pytest.mark.parametrize(
    ("kind", "section", "drain_s"),
    [
        ("gateway", {}, 30.0),
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


def test_a_user_who_waits_is_told_how_many_workers_are_ready() -> None:
    missing = ["0 of 2 workers have registered", "no group of the model is stable"]
    ready = {"missing": missing, "workers_expected": 2, "workers_registered": 0}
    line = "workers are loading the model (the first start with a dtype compiles kernels): 0 of 2"
    line += " ready"
    assert missing_of(ready) == Missing("; ".join(missing), line)
    ready = {"missing": ["the scheduler does not answer"], "workers_expected": None}
    assert missing_of(ready) == Missing(*["the scheduler does not answer"] * 2)


def test_progress_alone_is_not_said_again() -> None:
    stream = io.StringIO()
    report = Report(stream)
    report.doing("workers load the model", "1 s")
    report.doing("workers load the model", "2 s")
    assert stream.getvalue() == "  workers load the model (1 s)\n"


@pytest.mark.parametrize(("stopped", "words"), [(True, "  stopped after 0.0 s\n"), (False, "")])
def test_a_step_that_was_stopped_is_not_done(stopped: bool, words: str) -> None:
    stream = io.StringIO()
    with Report(stream).step("Services", lambda: stopped):
        pass
    assert stream.getvalue() == "Services\n" + words
