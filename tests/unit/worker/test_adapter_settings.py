"""Settings of a worker for adapters."""

from typing import Any

import pytest

from services.common.errors import ConfigError
from services.worker.adapter_settings import AdapterSettings


def settings(**changes: Any) -> AdapterSettings:
    given = {"adapter_slots": 2, "adapter_roots": ("/adapters",)}
    return AdapterSettings(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "engine", "message"),
    [
        ({}, "tideserve", "only `engine: vllm` loads adapters"),
        ({}, "openai", "only `engine: vllm` loads adapters"),
        ({"adapter_roots": ()}, "vllm", "requires 'adapter_roots'"),
        ({"adapter_slots": 0}, "vllm", "'adapter_roots' has no effect without 'adapter_slots'"),
        ({"adapter_slots": 0}, "tideserve", "remove it, or set 'adapter_slots'"),
        ({"adapter_rank_max": 24}, "vllm", "'adapter_rank_max' is 24, but vLLM supports 8, 16"),
    ],
)
def test_contradictory_settings_are_refused(
    changes: dict[str, Any], engine: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes).check(engine)


@pytest.mark.parametrize(
    ("changes", "engine"), [({}, "vllm"), ({"adapter_slots": 0, "adapter_roots": ()}, "tideserve")]
)
def test_consistent_settings_are_accepted(changes: dict[str, Any], engine: str) -> None:
    settings(**changes).check(engine)
