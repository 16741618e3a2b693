"""Real workers are stopped and killed while KV comes back from host memory: nothing is lost.

The device has room for the KV of a few prompts, and host memory for that of all.
"""

from pathlib import Path
from typing import Any

import httpx

from services.common.event_log import read_entries
from services.common.failpoint import read_hits
from services.core.audit.engine_history import EngineHistory
from services.core.audit.record import Findings
from tests.support.client import TIMEOUT_S, prompt_of
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tideserve.sim.replay import WORKER_TYPES

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 400, 8
ROUNDS_MAX = 20
WORKERS, MEMORY = 2, "18MiB"
STOPPED, KILLED = "engine.host.recall.leader", "engine.host.arrived.leader"
ARMED = [f"{STOPPED}=stop-worker:2.5@3", f"{KILLED}=kill-worker@2"]
"""In the first recall, for longer than its request waits for it; then at the end of the second."""
Reply = tuple[list[int], str]


def ask(cluster: Cluster, model: str, number: int) -> Reply:
    """The token ids of an answer, and why it has ended."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt_of(number, PROMPT_TOKENS),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["finish_reason"]


def recalled_tokens(cluster: Cluster) -> int:
    """Those of the worker that lives: the other one has not ended a recall."""
    return sum(row["recalled_tokens_total"] for row in cluster.status()["workers"])


def test_a_worker_may_be_stopped_or_die_in_a_recall(tmp_path: Path) -> None:
    logs, file = tmp_path / "events", tmp_path / "hits.jsonl"
    services = {"event_log": str(logs), "failpoints": ARMED, "failpoint_file": str(file)}
    with Cluster(
        model_dir=make_tiny_model(tmp_path / "model", seed=3, layers=4),
        workers=WORKERS,
        memory=MEMORY,
        chunk_size="64KiB",
        dtype="float64",
        host_memory="64MiB",
        worker={"save_from": 0.0, "lane_share": 1.0},
        services=services,
    ) as cluster:
        model = cluster.get("/v1/models")["data"][0]["id"]
        replies = [ask(cluster, model, number) for number in range(PROMPTS)]
        hits: list[dict[str, Any]] = []
        for _ in range(ROUNDS_MAX):
            assert [ask(cluster, model, number) for number in range(PROMPTS)] == replies
            hits = read_hits(file)
            if len(hits) == len(ARMED) and recalled_tokens(cluster):
                break
        assert {hit["name"] for hit in hits} == {STOPPED, KILLED}
        assert recalled_tokens(cluster), "no worker recalls KV after the losses"
    findings = Findings()
    for path in logs.glob("worker-*"):
        EngineHistory(findings).read(read_entries(path, WORKER_TYPES))
    assert not findings.violations
    assert findings.checks["I12"] and findings.checks["I13"]
