"""What every test shares: a failed test of a cluster shows the ends of that cluster's logs.

Side by side, the tests of a file that start or load something costly stay in one process. (Marks of
xdist for that have no effect with this pytest.)
"""

from collections.abc import Generator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.cluster import Cluster

TOGETHER = ("test_default_model.py", "test_default_model_merges.py", "test_token_equality.py")


class TogetherScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Every test by itself, but those of some files in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file.endswith(TOGETHER) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherScheduling:
    """Which process gets which tests."""
    return TogetherScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs to the report."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, Cluster):
        report.sections.append(("logs of the cluster", cluster.tail()))
    return report
