"""Every query of every board returns numbers from a real Prometheus after a flood.

The cluster has two workers with a tiny model; a flood causes merges and refusals, after which the
groups split. Prometheus is the one on PATH, or a Debian package that is fetched.
"""

import asyncio
import json
import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import check_rules
import httpx
import pytest
import yaml

from services.core.quota.limits import QuotaLimits
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tideserve.cli.cache import cache_root
from tideserve.cli.keys import add_key
from tideserve.cli.model_store import resolve_model
from tideserve.cli.tiny_model import DEEP, TINY_OPTIONS, write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]
BOARDS = REPOSITORY / "deploy" / "observability" / "grafana" / "dashboards"
# Grafana fills these variables in.
FILLED = {"$__rate_interval": "20s", "$model_name": ".*"}
SCRAPE_S = 1
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 96, 96, 96
AMPLE_LIMITS = QuotaLimits(10**9, 10**12, 10**6)


def queries() -> list[tuple[str, str]]:
    """Each query with its board and panel."""
    expressions = []
    for path in sorted(BOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for variable, value in FILLED.items():
                    expression = expression.replace(variable, value)
                expressions.append((f"{path.stem}: {panel['title']}", expression))
    return expressions


@contextmanager
def prometheus(binary: Path, folder: Path, targets: Path) -> Iterator[httpx.Client]:
    """A Prometheus that has scraped all `targets` once.

    Counts before a counter's first scrape do not register as an increase.
    """
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"},
        "scrape_configs": [{"job_name": "local", "file_sd_configs": [{"files": [str(targets)]}]}],
    }
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [str(binary), f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
    wanted = sum(len(entry["targets"]) for entry in json.loads(targets.read_text()))
    with httpx.Client(base_url=f"http://{address}", timeout=30.0) as client:

        def scraped() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            try:
                answer = client.get("/api/v1/query", params={"query": "up == 1"})
            except httpx.TransportError:
                return False
            return answer.is_success and len(answer.json()["data"]["result"]) == wanted

        try:
            asyncio.run(eventually(scraped))
            yield client
        finally:
            process.terminate()
            process.wait(timeout=30)


async def flood(url: str, model: str, key: str) -> list[int]:
    """Send all requests concurrently; returns their statuses."""
    headers = {"authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(
        base_url=url, timeout=100, limits=limits, headers=headers
    ) as client:

        async def ask(number: int) -> int:
            body = {
                "model": model,
                "prompt": [number % 100 + 10] * PROMPT_TOKENS,
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "stream": number % 2 == 0,
                # Some with targets.
                "service_tier": "priority" if number % 8 == 0 else "default",
            }
            return (await client.post("/v1/completions", json=body)).status_code

        return await asyncio.gather(*map(ask, range(REQUESTS)))


def has_numbers(answer: httpx.Response) -> bool:
    """Whether the result of a range query has at least one number."""
    series = answer.json()["data"]["result"] if answer.is_success else []
    return any(not math.isnan(float(value)) for curve in series for _, value in curve["values"])


def test_every_query_of_every_board_has_numbers(tmp_path: Path) -> None:
    reason = check_rules.fetch() if check_rules.find("prometheus") is None else None
    binary = check_rules.find("prometheus")
    if binary is None:
        pytest.skip(f"Prometheus is not here: {reason}")
    tokenizer_dir = resolve_model(None, cache_root(), print, "auto")
    model_dir = write_tiny_model(tmp_path / "model", tokenizer_dir, DEEP)
    keys = tmp_path / "keys.jsonl"
    key = add_key(keys, "boards", False, None, AMPLE_LIMITS)
    options: dict[str, Any] = {
        **TINY_OPTIONS,
        "queue_limit": 24,
        "memmgr": {"split_dwell_s": 2.0},
        "paced": "A100-14B",
        "api_keys": str(keys),
    }
    with (
        Cluster(model_dir, workers=2, memory="32MiB", **options) as cluster,
        prometheus(
            binary, tmp_path, cluster.folder / "cluster" / "prometheus_targets.json"
        ) as asked,
    ):

        def now(query: str) -> float:
            result = asked.get("/api/v1/query", params={"query": query}).json()["data"]["result"]
            return float(result[0]["value"][1]) if result else 0.0

        began_unix_s = time.time()
        cluster.eventually(
            lambda: (
                503 in asyncio.run(flood(cluster.url, model_dir.name, key))
                and now("sum(tideserve_memmgr_changes_total)") > 0
            ),
            120,
        )
        cluster.eventually(lambda: now("sum(tideserve_memmgr_merged_groups)") == 0)
        time.sleep(3 * SCRAPE_S)  # for the last scrapes
        window = {"start": began_unix_s, "end": time.time(), "step": SCRAPE_S}
        empty = [
            f"{place}: {query}"
            for place, query in queries()
            if not has_numbers(asked.get("/api/v1/query_range", params={"query": query, **window}))
        ]
    assert empty == []
