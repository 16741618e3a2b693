"""Arguments for vLLM that tideserve sets itself are refused; others are passed on."""

from typing import Any

import pytest

from services.common.errors import ConfigError
from services.worker.engine_args import devices_of, normalized


def test_names_may_be_written_as_flags() -> None:
    given = {"kv-cache-dtype": "fp8", "enforce_eager": True}

    assert normalized(given) == {"kv_cache_dtype": "fp8", "enforce_eager": True}


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        ({"max-model-len": 5}, "has max_model_len, which the worker's 'max_model_len' sets"),
        ({"gpu_memory_utilization": 0.9}, "which the worker's 'memory_bytes' sets"),
        ({"data_parallel_size": 2}, "start more workers instead"),
        ({"--enforce-eager": True}, "without dashes in front"),
        ({7: True}, "write names as in"),
        ({"a-b": 1, "a_b": 1}, "has a_b twice"),
    ],
)
def test_invalid_argument_names_are_refused(engine_args: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        normalized(engine_args)


def test_devices_are_the_product_of_both_sizes() -> None:
    assert devices_of({}) == 1
    assert devices_of({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}) == 8


@pytest.mark.parametrize("size", [0, -1, "two", 1.5, True, None])
def test_sizes_are_positive_integers(size: Any) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size in 'engine_args' is"):
        devices_of({"tensor_parallel_size": size})
