"""Real engines that merge and split pass the failpoints of `bench faults`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.faults.matrix import MOVE, PHASES
from services.common import failpoint
from services.core.groups.layer_map import Stage
from services.core.request import Limits, Request, Sampling
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.engine_group import EngineGroup
from tests.support.shipping_group import ShippingGroup
from tests.support.tiny_models import make_tiny_model

LAYERS = 3
APART = [[Stage("w0", 0, LAYERS)], [Stage("w1", 0, LAYERS)]]
TOGETHER = [[Stage("w0", 0, 2), Stage("w1", 2, LAYERS)]]


@pytest.fixture
def config(tmp_path: Path) -> RunnerConfig:
    folder = tmp_path / "model"
    make_tiny_model(folder, "llama", layers=LAYERS, hidden=32, heads=2, kv_heads=1)
    return RunnerConfig(
        model_dir=folder,
        device="cpu",
        dtype=torch.float64,
        budget_bytes=1 << 24,
        block_size=4,
        chunk_bytes=4096,
        max_batch_tokens=64,
        max_running=16,
        max_model_len=512,
        threads=1,
    )


@contextmanager
def with_requests(group: EngineGroup) -> Iterator[None]:
    """Start requests at both engines and run until all have tokens."""
    try:
        for number in range(6):
            prompt = tuple(range(3 + number, 23 + number))
            request = Request(f"r-{number}", prompt, Sampling(temperature=0.0), Limits(200), 0.0)
            group.start(request, APART[number % 2][0].worker_id)
        group.run_until(lambda: all(stream.tokens for stream in group.streams.values()))
        yield
    finally:
        failpoint.arm((), None)
        group.close()


@pytest.fixture
def group(config: RunnerConfig) -> Iterator[EngineGroup]:
    with with_requests(group := EngineGroup(config, 2, seed=1)):
        yield group


def points(phases: str) -> list[str]:
    return [
        PHASES[phase].point.format(role) for phase in phases.split() for role in PHASES[phase].roles
    ]


ONLINE_PHASES = " ".join(
    name
    for name, phase in PHASES.items()
    if not phase.batch and not phase.crowded and phase.change != MOVE
)


def arm_all(file: Path) -> None:
    names = points(ONLINE_PHASES)
    failpoint.arm([f"{name}=note" for name in names], file)


def hits(file: Path) -> list[str]:
    return [hit["name"] for hit in failpoint.read_hits(file)]


def test_both_roles_pass_every_phase_of_online_requests(group: EngineGroup, tmp_path: Path) -> None:
    file = tmp_path / "hits"
    arm_all(file)
    for _ in range(50):
        group.turn()
    assert hits(file) == [], "engines that serve alone pass none"
    group.change(TOGETHER)
    merge = points("prepare committed exchange")
    assert sorted(set(hits(file)) - set(points("steady"))) == sorted(merge)
    for _ in range(200):
        group.turn()
    assert sorted(hits(file)) == sorted([*merge, *points("steady")])
    group.change(APART)
    assert sorted(hits(file)) == sorted(points(ONLINE_PHASES))
    # All members were ready before the commit, and KV moved after it.
    order = hits(file)
    for earlier, later in (("prepare", "committed"), ("committed", "exchange")):
        assert max(map(order.index, points(earlier))) < max(map(order.index, points(later)))


def test_both_ends_of_a_move_pass_its_phases(config: RunnerConfig, tmp_path: Path) -> None:
    file = tmp_path / "hits"
    with with_requests(group := ShippingGroup(config, 2, seed=1)):
        names = points("ship_parts ship_sealed")
        failpoint.arm([f"{name}=note" for name in names], file)
        group.introduce("w0", "w1")
        order = group.ship("w0", "w1")
        group.carry(2000)
        group.run_until(lambda: order in group.shipped)
        assert group.shipped[order].moved
        group.run_until(lambda: set(hits(file)) == set(names))
        assert hits(file).index(names[0]) < hits(file).index(names[2]), "sealed after its parts"


@pytest.mark.parametrize("action", ["cut", "cut-activations", "cut-bulk"])
def test_the_other_member_notices_a_disconnected_member(
    action: str, group: EngineGroup, tmp_path: Path
) -> None:
    failpoint.on_cut(group.engines["w0"].member.cut_off)
    group.change(TOGETHER)
    other = group.engines["w1"].member
    assert other.trouble == ""
    failpoint.arm([f"engine.steady.microbatch.leader={action}"], tmp_path / "hits")
    group.run_until(lambda: other.trouble != "")
    assert hits(tmp_path / "hits") == ["engine.steady.microbatch.leader"]
