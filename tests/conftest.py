"""What every test shares: a failed test of a cluster shows the ends of that cluster's logs.

Side by side, the tests of a file stay in one process, which starts once what they share. (Marks of
xdist for that have no effect with this pytest.)
"""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support.cluster import Cluster

if not os.environ.get("TIDESERVE_TEST_DEVICE", "").startswith("cuda"):
    # Kernels for GPUs run on the processor. Triton looks when a kernel is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes is the machine's choice.
settings.register_profile("tideserve", deadline=None)
settings.load_profile("tideserve")

APART = ("test_group_tokens.py", "test_up.py", "test_profile.py")
"""Files whose tests take long and share nothing: any process takes the next of them."""
LONGEST = (
    *("test_group_tokens.py", "test_token_equality.py", "test_default_model_merges.py"),
    *("test_up.py", "test_profile.py", "test_default_model.py", "test_default_model_sampling.py"),
    *("test_event_log.py", "test_bench_command.py", "test_engines_merge.py"),
    *("test_changes.py", "test_kernel_cache.py", "test_co_runners.py", "test_attention.py"),
)
"""Files that come first, so that none of them goes on when the other processes have ended."""


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """The files in the order of collection, each in one process but for those named above."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if Path(file).name in APART else file


def place_of(item: pytest.Item) -> int:
    """The place of a test's file among the longest ones, or after them."""
    return LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    items.sort(key=place_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    """Which process gets which tests."""
    config.option.loadscopereorder = False  # it would put the files with the most tests first
    return FileScheduling(config, log)


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
