"""Defaults of a worker that follow from its engine, its device and other limits."""

from typing import Any

import pytest

from services.common.config import dump, from_mapping, parse_yaml
from services.common.errors import ConfigError
from services.core.host.vocabulary import HostSettings, Save
from services.core.role import Role
from services.core.setting import AUTO_BYTES
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
def test_defaults_follow_engine_and_device(
    given: dict[str, Any], limits: tuple[int, int, int]
) -> None:
    planner = from_mapping(WorkerConfig, GIVEN | given, "a test").planner
    assert (planner.block_size, planner.max_running, planner.max_batch_tokens) == limits


def test_contradictory_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'max_running' is 300, but must be 1 to .* \(200\)"):
        from_mapping(WorkerConfig, GIVEN | {"max_running": 300, "max_batch_tokens": 200}, "it")


@pytest.mark.parametrize(
    ("given", "size"), [(0, 0), ("0", 0), ("auto", AUTO_BYTES), ("8GiB", 8 << 30), (None, 0)]
)
def test_host_memory_is_a_size_auto_or_none(given: Any, size: int) -> None:
    settings = {} if given is None else {"host_memory": given}
    config = from_mapping(WorkerConfig, GIVEN | settings, "a test")
    assert config.host_copies.host_memory == size
    assert from_mapping(WorkerConfig, parse_yaml(dump(config), "it"), "it") == config


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"host_memory": -2}, "is -2, but must be 0 to 1024TiB or auto"),
        ({"host_memory": "much"}, "'much' is not a size"),
        ({"memory_bytes": "auto"}, "'auto' is not a size"),
        ({"host_memory": "1GiB", "prefix_caching": False}, "has no effect without"),
        ({"host_memory": "auto", **VLLM}, "'host_memory' has no effect with vLLM"),
        (
            {"host_memory": "1GiB", "engine": "openai", "upstream_url": "http://a:1"},
            "'host_memory' has no effect with an upstream server",
        ),
    ],
)
def test_host_memory_that_has_no_effect_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        from_mapping(WorkerConfig, GIVEN | given, "a test")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"prefix_caching": False}, "'role' is prefill, but .* only with 'prefix_caching'"),
        (VLLM, "'role' is prefill, but engine vllm hands over no requests"),
        ({"engine": "openai", "upstream_url": "http://a:1"}, "engine openai hands over no"),
    ],
)
def test_a_role_that_has_no_effect_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        from_mapping(WorkerConfig, GIVEN | given | {"role": "prefill"}, "a test")
    assert from_mapping(WorkerConfig, GIVEN | given, "a test").role is Role.MIXED


def test_planner_settings_follow_the_configuration() -> None:
    given = {"save": "all", "save_from": 0.25, "lane_share": 0.75, "prefetch": False}
    host = from_mapping(WorkerConfig, GIVEN | given, "a test").host_copies
    assert host.settings(100, 2e9) == HostSettings(100, 2e9, Save.ALL, 0.25, 0.75, False)
