"""Simulated host memory: less is recomputed, and copies take the time of their link."""

from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from tideserve.cli.simulate import figures_of_load
from tideserve.cli.simulation_options import simulations_of

PATH = Path("x.yaml")
SCARCE: dict[str, Any] = {
    "duration_s": 40,
    "profile": "A100-40G-7B",
    "kv_blocks": 700,
    "max_batch_tokens": 512,
    "lateness": 0,
    "queue_deadline_s": 3600,
    "scheduling": "conserve",
    "workload": {
        **{"kind": "on_off", "on_rate_per_s": 5, "on_s": 4, "off_s": 4},
        **{"prompt": 900, "output": 64},
    },
    "batch": {"clients": 16, "prompt": 900, "output": 256},
}
"""Bursts of online requests that take the KV of batch requests."""


def figures(**changes: Any) -> dict[str, Any]:
    (prepared,) = simulations_of(SCARCE | changes, PATH).values()
    (of,) = figures_of_load(prepared, lambda _name: None).values()
    return dict(of)


def test_copies_in_host_memory_save_computation() -> None:
    plain, host = figures(), figures(host_memory="16GiB")
    assert plain["recomputed_share"] > 0.05
    assert host["recomputed_share"] < 0.25 * plain["recomputed_share"]
    assert host["processed_tokens_per_s"] > plain["processed_tokens_per_s"]
    assert figures(host_memory="16GiB") == host, "a simulation cannot be repeated"


def test_a_slow_link_is_not_used_for_recalls() -> None:
    slow = figures(host_memory="16GiB", host_link_bytes_per_s=10**7)
    fast = figures(host_memory="16GiB")
    assert slow["recomputed_share"] > 2 * fast["recomputed_share"]


def test_little_host_memory_saves_little() -> None:
    little, much = figures(host_memory="256MiB"), figures(host_memory="16GiB")
    assert little["recomputed_share"] > much["recomputed_share"]


def test_recalls_without_prefetch_delay_other_work() -> None:
    off, on = (
        figures(host_memory="16GiB", prefetch=value, host_link_bytes_per_s=3 * 10**9)
        for value in (False, True)
    )
    assert off["processed_tokens_per_s"] < on["processed_tokens_per_s"]


def test_swap_copies_the_kv_of_online_requests() -> None:
    flood: dict[str, Any] = {
        "scheduling": "fcfs",
        "batch": {"clients": 1, "prompt": 100, "output": 10},
        "workload": {"kind": "gamma", "rate_per_s": 4, "cv": 1, "prompt": 300, "output": 600},
    }
    recompute = figures(**flood)
    swap = figures(**flood, overload_policy="swap", host_memory="16GiB")
    assert recompute["recomputed_share"] > 0.02
    assert swap["recomputed_share"] < 0.5 * recompute["recomputed_share"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"overload_policy": "swap"}, "'host_memory' is 0; set it to auto"),
        ({"host_memory": "1GiB", "prefix_caching": False}, "no effect without `prefix_caching`"),
        (
            {"profile": None, "host_memory": "1GiB", "cost": {"alpha_s": 0, "beta_s": 1e-5}},
            "lacks the size of KV or the link to host memory",
        ),
    ],
)
def test_invalid_options_are_refused(changes: dict[str, Any], sentence: str) -> None:
    if "cost" in changes:
        changes = changes | {"cost": {**changes["cost"], "gamma_s": 0.01, "lambda_s": 0.009}}
    with pytest.raises(ConfigError, match=sentence):
        simulations_of(SCARCE | changes, PATH)
