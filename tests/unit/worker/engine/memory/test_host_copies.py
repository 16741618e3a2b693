"""Copies of slabs in host memory, within a budget that an operator sets."""

from pathlib import Path

import torch

from services.worker.config import WorkerConfig
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.memory.host_copies import HostCopies


def slab(value: int, size: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_there_are_no_copies_by_default() -> None:
    """Workers of a host would compete for its memory."""
    assert WorkerConfig.__dataclass_fields__["host_weights_bytes"].default == 0
    config = RunnerConfig(Path("model"), "cpu", torch.float32, 2**20)
    copies = HostCopies(config.host_weights_bytes)
    copies.keep("layer", slab(1, 1))
    assert copies.get("layer") is None


def test_copies_stay_within_the_budget() -> None:
    copies = HostCopies(100)
    copies.keep("large", slab(1, 101))
    for number in range(4):
        copies.keep(f"layer-{number}", slab(number, 30))
    kept = [name for name in ("large", *(f"layer-{n}" for n in range(4))) if _is_kept(copies, name)]
    assert kept == ["layer-0", "layer-1", "layer-2"]
    copies.keep("small", slab(9, 10))
    assert _is_kept(copies, "small")


def test_a_copy_is_independent_of_the_slab_and_made_once() -> None:
    copies, source = HostCopies(100), slab(7, 40)
    copies.keep("layer", source)
    source.fill_(8)
    copies.keep("layer", source)
    copy = copies.get("layer")
    assert copy is not None and torch.equal(copy, slab(7, 40))
    copies.keep("next", slab(1, 60))
    assert _is_kept(copies, "next"), "the second copy of a name took budget"
    copies.remove("layer")
    assert copies.get("layer") is None


def _is_kept(copies: HostCopies, name: str) -> bool:
    return copies.get(name) is not None
