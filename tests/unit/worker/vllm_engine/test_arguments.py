"""A worker's configuration as vLLM's engine arguments."""

from pathlib import Path
from typing import Any

import pytest

from services.core.planner.config import IterationConfig
from services.core.queue_order import Scheduling
from services.core.service import Service, ServiceClass
from services.worker.adapter_settings import AdapterSettings
from services.worker.config import WorkerConfig
from services.worker.vllm_engine.arguments import (
    FIT_MODEL_LEN,
    arguments_of,
    flags_of,
    priority_of,
)


def config(**changes: Any) -> WorkerConfig:
    max_model_len = changes.pop("max_model_len", None)
    engine_args = changes.pop("engine_args", {})
    adapters = changes.pop("adapters", AdapterSettings())
    return WorkerConfig(
        etcd_url="http://127.0.0.1:2379",
        engine="vllm",
        engine_python=Path("/python"),
        model_name="m",
        model_dir=Path("/models/m"),
        max_model_len=max_model_len,
        engine_args=engine_args,
        adapters=adapters,
        memory_bytes=1 << 30,
        planner=IterationConfig(max_running=7, max_batch_tokens=300, **changes),
    )


def test_options_have_vllms_names() -> None:
    assert arguments_of(config(), 1 << 20) == {
        "model": "/models/m",
        "dtype": "bfloat16",
        "max_model_len": FIT_MODEL_LEN,
        "block_size": 16,
        "kv_cache_memory_bytes": 1 << 20,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 300,
        "enable_prefix_caching": None,
        "scheduling_policy": "priority",
    }
    for scheduling, policy in (("fcfs", "fcfs"), ("prefill_first", "fcfs")):
        arguments = arguments_of(config(scheduling=Scheduling(scheduling)), 1)
        assert arguments["scheduling_policy"] == policy
    assert arguments_of(config(max_model_len=99), 1)["max_model_len"] == 99


def test_kv_is_shared_by_the_devices() -> None:
    parallel = config(engine_args={"tensor-parallel-size": 2, "pipeline_parallel_size": 2})

    assert arguments_of(parallel, 1 << 20)["kv_cache_memory_bytes"] == 1 << 18


def test_arguments_become_flags_of_vllm() -> None:
    given = {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "async_scheduling": False,
        "quantization": None,
        "swap_space": -1,
        "hf_overrides": {"a": [1]},
        "lora_modules": ["a=b", {"name": "c"}],
    }

    assert flags_of(given) == [
        *("--tensor-parallel-size=2", "--enforce-eager", "--no-async-scheduling"),
        *("--swap-space=-1", '--hf-overrides={"a": [1]}'),
        *("--lora-modules", "a=b", '{"name": "c"}'),
    ]


@pytest.mark.parametrize(("option", "expected"), [(True, None), (False, False)])
def test_prefix_caching_can_be_turned_off(option: bool, expected: bool | None) -> None:
    """If on, vLLM decides: it has no such cache for some models."""
    arguments = arguments_of(config(prefix_caching=option), 1)
    assert arguments["enable_prefix_caching"] is expected


def test_a_priority_is_that_of_the_class_and_then_the_rank() -> None:
    """Smaller values run earlier in vLLM, too."""
    rising = [
        Service(kind, rank=rank) for kind in ServiceClass for rank in (-(2**40), -1, 0, 1, 2**40)
    ]
    priorities = [priority_of(service) for service in rising]
    assert priorities == sorted(priorities) and len(set(priorities)) == len(priorities)


def test_adapters_have_slots_of_their_largest_rank() -> None:
    adapters = AdapterSettings(adapter_slots=3, adapter_rank_max=32, adapter_roots=("/adapters",))
    arguments = arguments_of(config(adapters=adapters), 1 << 20)
    added = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 3, "max_lora_rank": 32}
    assert arguments == arguments_of(config(), 1 << 20) | added
