"""Defaults of a worker that follow from its engine, its device and other limits."""

from typing import Any

import pytest

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.worker.config import WorkerConfig

GIVEN = {"etcd_url": "e", "model_name": "m", "model_dir": "/m", "memory_bytes": 1}
VLLM = {"engine": "vllm", "engine_python": "/p"}


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, (16, 128, 256)),
        ({"max_running": 100}, (16, 100, 256)),
        ({"max_running": 300}, (16, 300, 300)),
        ({"max_batch_tokens": 64}, (16, 64, 64)),
        ({"max_running": 300, "max_batch_tokens": 400}, (16, 300, 400)),
        ({"device": "cuda:3"}, (16, 256, 2048)),
        ({"device": "cuda", "max_batch_tokens": 512}, (16, 256, 512)),
        ({"device": "cuda", "max_batch_tokens": 200}, (16, 200, 200)),
        (VLLM, (32, 128, 2048)),
        ({**VLLM, "device": "cuda:0"}, (32, 128, 2048)),
        ({**VLLM, "block_size": 16, "max_batch_tokens": 128}, (16, 128, 128)),
    ],
)
def test_defaults_suit_the_engine_the_device_and_each_other(
    given: dict[str, Any], limits: tuple[int, int, int]
) -> None:
    planner = from_mapping(WorkerConfig, GIVEN | given, "a test").planner
    assert (planner.block_size, planner.max_running, planner.max_batch_tokens) == limits


def test_two_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'max_running' is 300, but must be 1 to .* \(200\)"):
        from_mapping(WorkerConfig, GIVEN | {"max_running": 300, "max_batch_tokens": 200}, "it")
