"""Two workers on one GPU as a cluster: merge, drop, restore, and the death of a member.

Answers of random prompts are compared with an undisturbed run. In bfloat16 cuBLAS selects products
by batch size, so answers may differ without a fault: `repeated` has the difference between two
undisturbed runs. `--exact` uses a tiny model in float64, whose answers must be equal.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.faults.cluster import (
    BY_HAND,
    FaultCluster,
    StableWatch,
    alive_but,
    await_true,
    running_cluster,
    serve_alone,
)
from benchmarks.faults.load import Streams, stream_requests, undisturbed_answers
from benchmarks.faults.outcomes import StreamOutcome, Undisturbed, ending_by_length, ending_of
from benchmarks.faults.random_faults import RandomFault, strike
from benchmarks.gpu_steps.figures import Figures, step_parser
from benchmarks.group_changes import MERGE_PATH, SPLIT_PATH, change_groups
from benchmarks.systems.system import CPU, Deployment
from services.common.clock import monotonic_s
from services.common.size import parse_size_bytes
from tideserve.cli.cache import cache_root
from tideserve.cli.model_store import resolve_model
from tideserve.cli.process import tail_lines
from tideserve.cli.tiny_model import DEEP, TINY_ON_GPU, TINY_OPTIONS, write_tiny_model
from tideserve.load.workload import PlannedRequest

WORKERS = 2
CHANGE_TIMEOUT_S, WHOLE_TIMEOUT_S, BEGIN_TIMEOUT_S = 25.0, 30.0, 20.0
POLL_S = 0.02
LOG_LINES = 40
ON_GPU: Mapping[str, Any] = {**TINY_ON_GPU, "ready_timeout": 110, "worker": {"overlap": True}}
QWEN_1_5B: Mapping[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""The layers of Qwen2.5-1.5B, without biases, with the vocabulary of the default tokenizer."""


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """A model, its dtype and the memory of a worker; `requests` run at once."""

    config: Mapping[str, Any]
    dtype: str
    memory: str
    requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


LARGE = ClusterSetting(QWEN_1_5B, "bfloat16", "8GiB", 48, (300, 500), (600, 700))
EXACT = ClusterSetting(DEEP, "float64", "576MiB", 12, (24, 64), (200, 240))
DRY = ClusterSetting(DEEP, "float32", "64MiB", 4, (24, 64), (150, 200))


def main() -> None:
    """Start a cluster, measure, and write the file."""
    parser = step_parser(__doc__)
    parser.add_argument("--exact", action="store_true", help="a tiny model in float64")
    parser.add_argument("--tokenizer", type=Path, help="folder of one; default: the default model")
    chosen = parser.parse_args()
    setting = DRY if chosen.dry else EXACT if chosen.exact else LARGE
    device = CPU if chosen.dry else chosen.device
    figures = Figures(chosen.file)
    tokenizer = chosen.tokenizer or resolve_model(None, cache_root(), say, "auto")
    with tempfile.TemporaryDirectory(prefix="tideserve-gpu-") as folder:
        model = write_tiny_model(Path(folder, "model"), tokenizer, setting.config)
        deployment = Deployment(
            model_dir=model,
            model_name="random-weights",
            cache=cache_root(),
            workers=WORKERS,
            memory_bytes=parse_size_bytes(setting.memory),
            dtype=setting.dtype,
            device=device,
            options=TINY_OPTIONS if chosen.dry else ON_GPU,
        )
        began_s = time.monotonic()
        with running_cluster(deployment, WORKERS, BY_HAND, say) as cluster:
            figures.add("start_s", round(time.monotonic() - began_s, 2))
            trial = ClusterTrial(cluster, setting, figures)
            try:
                trial.run()
            finally:
                figures.add("worker_logs", logs_of(cluster))
    figures.end()


def say(text: str) -> None:
    """Print a line to the log."""
    print(text, file=sys.stderr, flush=True)


def logs_of(cluster: FaultCluster) -> dict[str, list[str]]:
    """The last lines of each worker's log, and of its engine's."""
    folder = Path(cluster.state["logs"])
    return {
        path.stem: tail_lines(path, LOG_LINES)
        for path in sorted(folder.glob("*.log"))
        if path.stem.startswith(("worker", "memmgr"))
    }


class ClusterTrial:
    """The parts of the step, in order of value."""

    def __init__(self, cluster: FaultCluster, setting: ClusterSetting, figures: Figures) -> None:
        self._cluster = cluster
        self._figures = figures
        self._requests: Sequence[PlannedRequest] = [
            *stream_requests(
                setting.requests, 1, setting.output_tokens, prompt_tokens=setting.prompt_tokens
            )
        ]
        self._wanted: list[Undisturbed] = []

    def run(self) -> None:
        """Serve, merge, split, kill; each part needs the one before."""
        measure = self._figures.measure
        measure("capacity", self._capacity)
        measure("served", self._serve)
        if not self._wanted:
            return
        measure("repeated", self._repeat)
        measure("merged", lambda: self._change(MERGE_PATH))
        measure("capacity_merged", self._capacity)
        measure("split", lambda: self._change(SPLIT_PATH))
        measure("merged_again", lambda: self._change(MERGE_PATH))
        measure("killed", self._kill)
        measure("moved", self._metrics)

    def _serve(self) -> dict[str, Any]:
        """The undisturbed answers, after a run that compiles the kernels."""
        cluster, requests = self._cluster, self._requests
        warm_s = monotonic_s()
        undisturbed_answers(cluster.url, cluster.model, requests[:4])
        began_s = monotonic_s()
        self._wanted = undisturbed_answers(cluster.url, cluster.model, requests)
        took_s = monotonic_s() - began_s
        tokens = sum(len(answer.token_ids) for answer in self._wanted)
        return {"warm_s": began_s - warm_s, "took_s": took_s, "tokens_per_s": tokens / took_s}

    def _repeat(self) -> dict[str, Any]:
        streams = self._start("repeated")
        return self._endings(streams.wait(), 0.0)

    def _change(self, path: str) -> dict[str, Any]:
        """Change the groups while all streams run."""
        cluster = self._cluster
        streams = self._start(path.rpartition("/")[-1])
        self._await_begun(streams)
        asked_s = monotonic_s()
        refused = change_groups(cluster.admin_url, path, CHANGE_TIMEOUT_S)
        changed_s = monotonic_s()
        running = len(self._requests) - streams.ended
        stable = await_true(lambda: cluster.stable(cluster.workers), WHOLE_TIMEOUT_S)
        settled_s = monotonic_s()
        endings = self._endings(streams.wait(), asked_s)
        if not stable:
            raise TimeoutError(f"the groups do not settle; endings: {endings}")
        return {
            "refused_at_first": refused,
            "change_s": changed_s - asked_s,
            "settled_s": settled_s - asked_s,
            "streams_running_after": running,
            "groups": len(cluster.status()["groups"]),
            **endings,
        }

    def _kill(self) -> dict[str, Any]:
        """SIGKILL of a member of the merged group while all streams run."""
        cluster = self._cluster
        streams = self._start("killed")
        self._await_begun(streams)
        status = cluster.status()
        struck = strike(RandomFault("worker"), status, {}, Random(1))
        hit_s = monotonic_s()
        pids = {str(row["id"]): set(row["pids"]) for row in status["workers"]}
        survivors = {name for name in pids if not pids[name] & struck.killed}
        alive = alive_but(struck.killed)
        watch = StableWatch(lambda: cluster.holds(lambda now: serve_alone(now, survivors, alive)))
        try:
            outcomes = streams.wait()
            whole = await_true(lambda: cluster.stable(pids, struck.killed), WHOLE_TIMEOUT_S)
        finally:
            alone_s = watch.end()
        return {
            "killed": struck.description,
            "alone_after_s": None if alone_s is None else alone_s - hit_s,
            "whole_again": whole,
            "whole_within_s": monotonic_s() - hit_s,
            **self._endings(outcomes, hit_s),
        }

    def _start(self, salt: str) -> Streams:
        streams = Streams(self._cluster.url, self._cluster.model, self._requests, salt)
        streams.start()
        return streams

    def _await_begun(self, streams: Streams) -> None:
        """Wait until all streams have a token, at most as long as they run."""
        deadline_s = monotonic_s() + BEGIN_TIMEOUT_S
        while streams.begun < len(self._requests) and monotonic_s() < deadline_s:
            time.sleep(POLL_S)

    def _endings(self, outcomes: Sequence[StreamOutcome], since_s: float) -> dict[str, Any]:
        """How the streams ended, by length and compared with the undisturbed answers.

        `silences_s`: the longest gap of each stream between tokens after `since_s`, sorted.
        """
        pairs = list(zip(outcomes, self._wanted, strict=True))
        by_length = Counter(
            ending_by_length(outcome, len(wanted.token_ids))[0] for outcome, wanted in pairs
        )
        compared = [ending_of(outcome, wanted) for outcome, wanted in pairs]
        silences_s = sorted(outcome.silence_s(since_s) for outcome in outcomes)
        return {
            "by_length": dict(by_length),
            "compared": dict(Counter(kind for kind, _ in compared)),
            "differences": [why for _, why in compared if why][:6],
            "silence_p50_s": silences_s[len(silences_s) // 2],
            "silence_max_s": silences_s[-1],
        }

    def _capacity(self) -> list[dict[str, Any]]:
        """Blocks, group and lack of capabilities of each worker."""
        return [dict(row) for row in self._cluster.status()["workers"]]

    def _metrics(self) -> dict[str, float]:
        """Counters of what moved between the workers, summed over them."""
        parts = ("restored", "moved", "shipped", "recomputed", "dropped", "exchange", "pipeline")
        return select(self._cluster.metrics(), lambda name: any(part in name for part in parts))


def select(values: Mapping[str, float], keep: Callable[[str], bool]) -> dict[str, float]:
    """The values that are not zero and whose name is kept."""
    return {name: value for name, value in sorted(values.items()) if value and keep(name)}


if __name__ == "__main__":
    main()
