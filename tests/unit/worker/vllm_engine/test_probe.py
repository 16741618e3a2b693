"""A vLLM that lacks a required part is refused before it loads a model."""

from dataclasses import dataclass

import pytest

from services.worker.vllm_engine.probe import UsedPart, fault, version_of


@dataclass
class Stats:
    """Fields with and without a default."""

    running: int
    waiting: int = 0


class Later(Stats):
    """Inherits fields."""


class Made:
    """Its attribute exists in instances only."""

    def __init__(self) -> None:
        self.preempted = 0

    def record(self, stats: object, engine_idx: int = 0) -> None:
        """A method with parameters."""


PARTS = (
    UsedPart("Stats", Later, ("running", "waiting")),
    UsedPart("Made", Made(), ("preempted", "record")),
    UsedPart("Made.record", Made.record, ("stats", "engine_idx")),
)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.40.0+cpu", "1.0", "dev"])
def test_a_version_with_all_parts_is_used(version: str) -> None:
    assert fault(version, PARTS) is None


def test_versions_before_the_oldest_are_refused() -> None:
    assert "vLLM 0.31.0 is installed, but 0.32 or newer" in (fault("0.31.0", PARTS) or "")
    assert version_of("0.32.0+cpu") == (0, 32) and version_of("dev") is None


@pytest.mark.parametrize(
    "part",
    [
        UsedPart("Part", Stats, ("running", "gone")),
        UsedPart("Part", Made(), ("gone",)),
        UsedPart("Part", Made, ("preempted", "gone")),
        UsedPart("Part", Made.record, ("gone",)),
        UsedPart("Part", int, ("gone",)),
    ],
)
def test_missing_members_are_named(part: UsedPart) -> None:
    assert "Part.gone, which tideserve uses; install" in (fault("0.50.0", (*PARTS, part)) or "")
