"""`engine_args` reach the real vLLM, whose own parser checks them before a model is loaded.

It needs the environment of `tideserve engine install vllm`, and takes some minutes.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.common.vllm_environment import vllm_environment
from tests.support.client import stream_completion
from tests.support.cluster import Cluster
from tideserve.cli.cache import cache_root
from tideserve.cli.vllm_install import installed_vllm

START_S = 900.0
BLOCKS = 40
ROOT = Path(__file__).resolve().parents[2]
PYTHON = installed_vllm(cache_root())
# Prints vLLM's parsed arguments, or its error, for each mapping on standard input.
CHECK = f"""
import json, sys
sys.path.append({str(ROOT)!r})
import vllm
from services.worker.vllm_engine.async_llm import USED_PARTS, VllmUnusable, parsed_arguments
from services.worker.vllm_engine.probe import fault
found = [fault(vllm.__version__, USED_PARTS)]
for engine_args in json.load(sys.stdin):
    try:
        found.append(parsed_arguments(engine_args))
    except VllmUnusable as error:
        found.append(str(error))
print("\\n" + json.dumps(found))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * START_S),
    pytest.mark.skipif(PYTHON is None, reason="needs `tideserve engine install vllm`"),
]


def parsed(*engine_args: dict[str, Any]) -> list[Any]:
    """The probe's result, and the parser's results for each mapping."""
    assert PYTHON is not None
    done = subprocess.run(
        [str(PYTHON), "-P", "-c", CHECK],
        input=json.dumps(engine_args),
        env=vllm_environment({"PATH": "/usr/bin:/bin"}, PYTHON, 1),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=True,
    )
    results: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_vllms_parser_reads_the_arguments() -> None:
    good = {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "kv_cache_dtype": "fp8",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }
    probe, none, read, *refused = parsed(
        {},
        good,
        {"tensor_parallel_size": "two"},
        {"kv_cache_dtype": "fp9"},
        {"no_such_argument": 1},
        # An abbreviation of several arguments, and an argument of the server.
        {"tensor": 2},
        {"middleware": "x"},
    )

    assert probe is None and none == {} and read == good
    messages = [
        "argument --tensor-parallel-size/-tp: invalid int value: 'two'",
        "argument --kv-cache-dtype: invalid choice: 'fp9'",
        "unrecognized arguments: --no-such-argument=1",
        "unrecognized arguments: --tensor=2",
        "unrecognized arguments: --middleware=x",
    ]
    assert len(refused) == len(messages)
    for text, wanted in zip(refused, messages, strict=True):
        assert text.startswith(f"vLLM rejected 'engine_args': {wanted}")


async def test_an_argument_takes_effect() -> None:
    with Cluster(
        workers=1,
        memory="330MiB",
        dtype="bfloat16",
        engine="vllm",
        max_batch_tokens=512,
        ready_timeout=START_S,
        threads=1,
        worker={
            "start_timeout_s": START_S,
            "engine_args": {"num-gpu-blocks-override": BLOCKS, "enforce_eager": True},
        },
    ) as cluster:
        (row,) = cluster.workers()
        # vLLM reserves a block.
        assert row["kv_blocks_total"] == BLOCKS - 1
        answer = await stream_completion(cluster.url, prompt="Hello", max_tokens=4)
    assert answer.text


async def test_a_worker_may_compute_tensor_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it, vLLM requires a NUMA node per process. The model has nine attention heads.
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(3))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    with Cluster(
        workers=1,
        memory="330MiB",
        dtype="bfloat16",
        engine="vllm",
        max_batch_tokens=512,
        ready_timeout=START_S,
        threads=1,
        worker={
            "start_timeout_s": START_S,
            "engine_args": {"tensor_parallel_size": 3, "enforce_eager": True},
        },
    ) as cluster:
        answer = await stream_completion(cluster.url, prompt="Hello", max_tokens=4)
    assert answer.text
