"""vLLM's CPU build as a peer: an instance per worker, with the same total cores and KV bytes."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.systems.process_cost import ProcessCost, read_process_cost
from benchmarks.systems.system import AMPLE, Counters, Deployment, Say, read_metrics
from benchmarks.systems.url import vllm_counters
from services.common.vllm_environment import compiled_folder, vllm_environment
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import ServerProcess, answers, free_port
from tideserve.cli.vllm_install import VLLM_VERSION, ensure_vllm, vllm_python

READY_TIMEOUT_S = 1800.0  # compilation is slow on a busy machine
# The CPU backend prefers multiples of 32; a smaller block wastes less of a small cache.
BLOCK_TOKENS = 32
NULL_BLOCKS = 1
"""vLLM keeps a block empty, so it gets an extra block to fill the same number."""
MODEL_LEN_MAX = 8192
PRIORITY = "priority"
"""Suffix of instances with the priority scheduler."""
GIB = 1 << 30
Number = TypeVar("Number", int, float)


class Vllm:
    """Instances behind the client's round-robin; a System."""

    def __init__(self, name: str, off: Sequence[str], deployment: Deployment) -> None:
        self.name = name
        self.model = deployment.model_name
        self.api_key: str | None = None
        self.urls: Sequence[str] = ()
        self._off = off
        self._deployment = deployment
        self._folder: Path | None = None
        self._processes: list[ServerProcess] = []

    def start(self, say: Say) -> None:
        python = ensure_vllm(self._deployment.cache, say)
        self._folder = Path(tempfile.mkdtemp(prefix="tideserve-bench-"))
        blocks = self.blocks
        say(
            f"{self.name}: starting {self._deployment.workers} instances (a minute or two; the"
            " first start compiles for some minutes)"
        )
        # The first instance compiles alone; the others use its compilation cache.
        compiled = compiled_folder(vllm_python(self._deployment.cache))
        alone = not any((compiled / "torchinductor").glob("fxgraph/*"))
        urls = []
        for index in range(self._deployment.workers):
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            process = ServerProcess(
                [str(python), *self.arguments(port, blocks)],
                self._folder / f"vllm-{index}.log",
                self._environment(python, index),
            )
            self._processes.append(process)
            urls.append(url)
            if alone:
                process.wait_until(partial(answers, f"{url}/health"), READY_TIMEOUT_S)
        for process, url in zip(self._processes, urls, strict=True):
            process.wait_until(partial(answers, f"{url}/health"), READY_TIMEOUT_S)
        self.urls = tuple(urls)

    def arguments(self, port: int, blocks: int) -> list[str]:
        """Command line of an instance that can fill `blocks` KV blocks."""
        deployment = self._deployment
        config = json.loads((deployment.model_dir / "config.json").read_text(encoding="utf-8"))
        context = int(config.get("max_position_embeddings", MODEL_LEN_MAX))
        return [
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(deployment.model_dir), "--served-model-name", deployment.model_name),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", deployment.dtype),
            *("--max-model-len", str(min(MODEL_LEN_MAX, context, blocks * BLOCK_TOKENS))),
            *("--block-size", str(BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", str(blocks + NULL_BLOCKS)),
            *("--max-num-seqs", str(deployment.max_running)),
            *(("--scheduling-policy", "priority") if PRIORITY in self._off else ()),
        ]

    @property
    def blocks(self) -> int:
        """KV blocks of an instance: the same number of bytes as a tideserve worker.

        Without a tideserve worker in the run, all memory except the parameters is KV cache. With
        the memory limit off, all additional memory is KV cache.
        """
        deployment = self._deployment
        kv_bytes = deployment.kv_bytes
        if kv_bytes is None:
            kv_bytes = deployment.memory_bytes - deployment.parameter_bytes
        if AMPLE in self._off:
            kv_bytes += deployment.ample_memory_bytes - deployment.memory_bytes
        blocks = kv_bytes // self._block_bytes
        if blocks < 1:
            raise SystemUnavailable("the memory of a worker leaves no KV cache for vLLM")
        return blocks

    def stop(self) -> None:
        for process in self._processes:
            process.stop()
        self._processes.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def process_cost(self) -> ProcessCost:
        """CPU time of all processes since their start."""
        return read_process_cost([process.pid for process in self._processes])

    def rest(self) -> bool:
        """See System; suspends the processes, since a restart would take minutes."""
        for process in self._processes:
            process.freeze()
        return True

    def wake(self) -> None:
        for process in self._processes:
            process.thaw()

    def counters(self) -> Counters:
        counters = [vllm_counters(read_metrics(url)) for url in self.urls]
        return Counters(
            preemptions=_total([instance.preemptions for instance in counters]),
            capacity_tokens=self.blocks * BLOCK_TOKENS * self._deployment.workers,
            processed=_total([instance.processed for instance in counters]),
            output=_total([instance.output for instance in counters]),
        )

    def describe(self) -> Mapping[str, Any]:
        exact = self._deployment.kv_bytes is not None
        path, name = str(self._deployment.model_dir), self._deployment.model_name
        return {
            "kind": "vllm",
            "version": VLLM_VERSION,
            "dtype": self._deployment.dtype,
            # Leave out the paths of models, since results are published.
            "arguments": [name if x == path else x for x in self.arguments(0, self.blocks)],
            "instances": self._deployment.workers,
            "threads": [self._threads(index) for index in range(self._deployment.workers)],
            "kv_bytes_per_instance": self.blocks * self._block_bytes,
            "kv_bytes_from": "a tideserve worker" if exact else "memory less parameters",
            "kv_capacity_tokens": self.counters().capacity_tokens,
        }

    @property
    def _block_bytes(self) -> int:
        return BLOCK_TOKENS * self._deployment.kv_bytes_per_token

    def _threads(self, index: int) -> int:
        """Number of threads of instance `index`."""
        cores, workers = len(self._deployment.cores), self._deployment.workers
        return max(1, (index + 1) * cores // workers - index * cores // workers)

    def _environment(self, python: Path, index: int) -> dict[str, str]:
        own = vllm_environment(os.environ, python, self._threads(index))
        kv_space = -(-self.blocks * self._block_bytes // GIB) + 1
        return {**own, "VLLM_CPU_KVCACHE_SPACE": str(kv_space)}


def _total(values: Sequence[Number | None]) -> Number | None:
    """The sum; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
