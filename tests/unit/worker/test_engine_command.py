"""The process that runs a worker's model, and contradictory configurations."""

import sys
from typing import Any

import pytest

from services.common.config import from_mapping
from services.common.errors import ConfigError
from services.core.planner.config import GPU_LIMITS
from services.worker.config import WorkerConfig
from services.worker.engine_client import VLLM_ENGINE, engine_command, engine_environment

OPENAI = {"engine": "openai", "upstream_url": "http://host:8000"}
VLLM = {"engine": "vllm", "engine_python": "/venv/bin/python"}


def config(**fields: Any) -> WorkerConfig:
    given = {"etcd_url": "e", "model_name": "m", "model_dir": "/m", "memory_bytes": 1}
    return from_mapping(WorkerConfig, given | fields, "a test")


def test_the_builtin_engine_is_a_module_of_this_python() -> None:
    assert engine_command(config()) == [sys.executable, "-m", "services.worker.engine"]
    inherited = {"TIDESERVE__ETCD_PASSWORD": "x", "PYTHONPATH": "/here"}
    environment = engine_environment(config(threads=3), inherited)
    assert environment == {"PYTHONPATH": "/here", "OMP_NUM_THREADS": "3"}


def test_vllm_runs_an_adapter_script_in_its_own_environment() -> None:
    assert engine_command(config(**VLLM)) == ["/venv/bin/python", "-P", str(VLLM_ENGINE)]
    assert VLLM_ENGINE.is_file()
    inherited = {"TIDESERVE__ETCD_PASSWORD": "x", "PYTHONPATH": "/here", "PATH": "/bin"}
    environment = engine_environment(config(**VLLM, threads=3), inherited)
    assert not {"TIDESERVE__ETCD_PASSWORD", "PYTHONPATH"} & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in engine_environment(config(**VLLM, device="cuda"), inherited)


def test_an_upstream_server_needs_no_memory_here() -> None:
    given = {"etcd_url": "e", "model_name": "m", "model_dir": "/m", **OPENAI}
    worker_config = from_mapping(WorkerConfig, given, "a test")
    assert engine_command(worker_config) == [sys.executable, "-m", "services.worker.openai_engine"]
    assert engine_environment(worker_config, {"TIDESERVE__X": "y", "A": "b"}) == {"A": "b"}
    assert worker_config.planner.max_running == GPU_LIMITS["max_running"]
    with pytest.raises(ConfigError, match="'memory_bytes' is missing"):
        from_mapping(WorkerConfig, {k: v for k, v in given.items() if k not in OPENAI}, "a test")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "vllm"}, "requires 'engine_python': run `tideserve engine install vllm`"),
        ({"engine_python": "/p"}, "'engine_python' requires `engine: vllm`"),
        ({**VLLM, "dtype": "float64"}, "vLLM does not support; choose bfloat16 or float32"),
        ({**VLLM, "load_format": "dummy"}, "'load_format' is dummy"),
        ({**VLLM, "paced": "A100-14B"}, "'paced' has no effect with vLLM"),
        ({**VLLM, "chunk_bytes": "2MiB"}, "'chunk_bytes' has no effect with vLLM"),
        ({**VLLM, "event_log": "/log"}, "'event_log' has no effect with vLLM"),
        (
            {**VLLM, "host_weights_bytes": "1GiB"},
            "'host_weights_bytes' has no effect with vLLM",
        ),
        ({"engine_args": {"enforce_eager": True}}, "'engine_args' requires `engine: vllm`"),
        ({**VLLM, "engine_args": {"dtype": "half"}}, "'engine_args' has dtype, which the worker's"),
        (
            {**VLLM, "device": "cuda", "engine_args": {"tensor_parallel_size": 2}},
            "set 'device' to the first of them, such as cuda:0",
        ),
        ({"engine": "openai"}, "'upstream_url' is '', but with `engine: openai` must be"),
        ({**OPENAI, "upstream_url": "http://h:1/v1"}, "the address of a server without a path"),
        ({"upstream_url": "http://h"}, "'upstream_url' requires `engine: openai`; remove it"),
        ({**OPENAI, "paced": "A100-14B"}, "'paced' has no effect with an upstream server"),
        (
            {"execution": "padded"},
            "`execution: padded` only changes the times of paced workers; set 'paced'",
        ),
        ({**VLLM, "execution": "static"}, "`execution: static` only changes the times of paced"),
        ({"engine": "llama"}, "must be one of tideserve, vllm"),
        (
            {"scheduling": "fcfs", "packing": True},
            "'packing' has no effect with `scheduling: fcfs`; remove it, or set",
        ),
        ({"scheduling": "bros", "adaptive_slots": True}, "'adaptive_slots' has no effect with"),
        ({"scheduling": "priority", "victims": "slack"}, "'victims' has no effect with"),
    ],
)
def test_contradictory_options_are_a_short_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**fields)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("device", "shown", "wanted"),
    [
        ("cuda:1", None, "1"),
        ("cuda:1", "4,5", "5"),
        ("cuda:2", "4,5", "2"),
        ("cuda", "4,5", "4,5"),
        ("cpu", None, None),
    ],
)
def test_vllm_sees_the_gpu_of_its_worker(
    device: str, shown: str | None, wanted: str | None
) -> None:
    inherited = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    environment = engine_environment(config(**VLLM, device=device), inherited)
    assert environment.get("CUDA_VISIBLE_DEVICES") == wanted


@pytest.mark.parametrize(
    ("device", "shown", "wanted"),
    [
        ("cuda:2", None, "2,3"),
        ("cuda:2", "4,5,6,7", "6,7"),
        ("cuda:1", "4,5", "1,2"),
        ("cpu", None, None),
    ],
)
def test_vllm_sees_all_gpus_of_its_worker(
    device: str, shown: str | None, wanted: str | None
) -> None:
    inherited = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    parallel = config(**VLLM, device=device, engine_args={"pipeline_parallel_size": 2})
    assert engine_environment(parallel, inherited).get("CUDA_VISIBLE_DEVICES") == wanted
