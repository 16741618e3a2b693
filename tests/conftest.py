"""What every test shares: a failed test of a cluster shows the ends of that cluster's logs."""

from collections.abc import Generator

import pytest

from tests.support.cluster import Cluster


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
