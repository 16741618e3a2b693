"""Memory of the machine and of a container."""

from pathlib import Path

import psutil
import pytest

from services.common import host_memory
from services.common.host_memory import available_bytes, limit_bytes


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a control group, which has none yet."""
    monkeypatch.setattr(host_memory, "CONTAINER", tmp_path)
    return tmp_path


def test_without_a_limit_available_memory_is_that_of_the_machine(container: Path) -> None:
    total = psutil.virtual_memory().total
    assert limit_bytes() == total and 0 < available_bytes() <= total
    (container / "memory.max").write_text("max\n")
    (container / "memory.current").write_text("1000\n")
    assert limit_bytes() == total and 1000 < available_bytes() <= total


def test_available_memory_of_a_container_follows_its_limit(container: Path) -> None:
    (container / "memory.max").write_text("100000\n")
    assert limit_bytes() == 100_000
    (container / "memory.current").write_text("70000\n")
    (container / "memory.stat").write_text("anon 50000\ninactive_file 15000\nactive_file 5000\n")
    assert available_bytes() == 100_000 - 70_000 + 15_000


def test_a_container_beyond_its_limit_has_no_available_memory(container: Path) -> None:
    (container / "memory.max").write_text("1000\n")
    (container / "memory.current").write_text("70000\n")
    (container / "memory.stat").write_text("inactive_file 0\n")
    assert available_bytes() == 0
