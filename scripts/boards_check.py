"""Run every query of every Grafana board against a real Prometheus that scrapes a loaded cluster.

Starts a cluster of two workers with a tiny model, floods it until groups merge and requests are
refused, waits until they have split again, and asks Prometheus each query over that time. A query
without a single number is a failure. Needs Prometheus: on PATH, or unpacked by `--fetch` (Debian).
Ends with 77 where it cannot be had.
"""

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from check_rules import UNAVAILABLE, fetch, find  # noqa: E402

from benchmarks.systems.gateway_cost import GatewayCost  # noqa: E402
from benchmarks.systems.system import Deployment  # noqa: E402
from benchmarks.systems.tideserve import Tideserve  # noqa: E402
from services.core.quota.limits import QuotaLimits  # noqa: E402
from tideserve.cli.cache import cache_root  # noqa: E402
from tideserve.cli.keys import add_key  # noqa: E402
from tideserve.cli.local_cluster import free_port  # noqa: E402
from tideserve.cli.model_store import resolve_model  # noqa: E402
from tideserve.cli.report import Report  # noqa: E402
from tideserve.cli.tiny_model import DEEP, TINY_OPTIONS, write_tiny_model  # noqa: E402

BOARDS = ROOT / "deploy" / "observability" / "grafana" / "dashboards"
MODEL = "boards"
# Grafana fills these variables in.
FILLED = {"$__rate_interval": "20s", "$model_name": ".*"}
SCRAPE_S = 1
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 96, 96, 96
QUEUE_LIMIT = 24
FLOOD_LIMIT_S = 120.0
SPLIT_LIMIT_S = 60.0
REQUEST_TIMEOUT_S = 100.0
START_LIMIT_S = 30.0
AMPLE_LIMITS = QuotaLimits(10**9, 10**12, 10**6)
OPTIONS: dict[str, Any] = {
    **TINY_OPTIONS,
    "queue_limit": QUEUE_LIMIT,
    "memmgr": {"split_dwell_s": 2.0},
}


def queries() -> list[tuple[str, str]]:
    """Each query with the board and panel that it belongs to."""
    found = []
    for path in sorted(BOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for variable, value in FILLED.items():
                    expression = expression.replace(variable, value)
                found.append((f"{path.stem}: {panel['title']}", expression))
    return found


def has_numbers(answer: dict[str, Any]) -> bool:
    """Whether the answer to a range query holds at least one number."""
    values = [value for series in answer["data"]["result"] for _, value in series["values"]]
    return any(not math.isnan(float(value)) for value in values)


@contextmanager
def prometheus(binary: Path, folder: Path, targets: Path) -> Iterator[str]:
    """A Prometheus that scrapes `targets`, with its data below `folder`; yields its URL."""
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
    try:
        wait_for(f"http://{address}/-/ready", process)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Return once `url` answers; raises RuntimeError if it does not in time."""
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(url, timeout=1.0).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError("Prometheus does not start")


def wait_for_scrapes(url: str, targets: Path) -> None:
    """Return once every target has been scraped; raises RuntimeError if they are not in time.

    Counts from before a counter's first scrape are no increase.
    """
    wanted = sum(len(entry["targets"]) for entry in json.loads(targets.read_text()))
    deadline_s = time.monotonic() + START_LIMIT_S
    up: list[Any] = []
    while time.monotonic() < deadline_s:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": "up == 1"}, timeout=5.0)
        up = answer.json()["data"]["result"]
        if len(up) == wanted:
            return
        time.sleep(0.2)
    raise RuntimeError(f"Prometheus has scraped {len(up)} of {wanted} targets")


class Keyed(Tideserve):
    """A cluster whose doors want keys; its gateway's cost is not asked for, as that needs one."""

    def gateway_cost(self) -> GatewayCost:
        """See Tideserve."""
        return GatewayCost(0.0, 0)


async def flood(url: str, key: str) -> dict[int, int]:
    """Send all requests at once; how many answers there were by status."""
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(
        base_url=url,
        timeout=REQUEST_TIMEOUT_S,
        limits=limits,
        headers={"authorization": f"Bearer {key}"},
    ) as client:

        async def ask(number: int) -> int:
            body = {
                "model": MODEL,
                "prompt": [number % 100 + 10] * PROMPT_TOKENS,
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "stream": number % 2 == 0,
                # Some with targets.
                "service_tier": "priority" if number % 8 == 0 else "default",
            }
            return (await client.post("/v1/completions", json=body)).status_code

        codes = await asyncio.gather(*map(ask, range(REQUESTS)))
    return {code: codes.count(code) for code in set(codes)}


def load(system: Tideserve, key: str) -> None:
    """Flood until a merge, a refusal and a split have happened. Raises RuntimeError otherwise."""
    deadline_s = time.monotonic() + FLOOD_LIMIT_S
    refused, merged = 0, 0.0
    while not (refused and merged):
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"{refused} refusals, {merged:.0f} changes; the flood does too little"
            )
        statuses = asyncio.run(flood(system.urls[0], key))
        refused += statuses.get(503, 0)
        merged = system.metrics().get("tideserve_memmgr_changes_total", 0.0)
        print(f"answers by status: {statuses}; changes of groups: {merged:.0f}", flush=True)
    deadline_s = time.monotonic() + SPLIT_LIMIT_S
    while system.metrics().get("tideserve_memmgr_merged_groups") != 0:
        if time.monotonic() > deadline_s:
            raise RuntimeError("the groups have not split")
        time.sleep(1.0)
    time.sleep(3 * SCRAPE_S)


def ask_all(url: str, began_unix_s: float) -> list[str]:
    """Ask every query over the time of the run; what has no number, a line each."""
    empty = []
    window = {"start": began_unix_s, "end": time.time(), "step": SCRAPE_S}
    with httpx.Client(base_url=url, timeout=30.0) as client:
        for place, expression in queries():
            answer = client.get("/api/v1/query_range", params={"query": expression, **window})
            if not answer.is_success or not has_numbers(answer.json()):
                empty.append(f"{place}: {expression}")
    return empty


def check(binary: Path) -> list[str]:
    """Start everything, load it, ask; queries without a number."""
    tokenizer_dir = resolve_model(None, cache_root(), Report().line, "auto")
    with tempfile.TemporaryDirectory(prefix="tideserve-boards-") as name:
        folder = Path(name)
        keys = folder / "keys.jsonl"
        key = add_key(keys, "boards", False, None, AMPLE_LIMITS)
        deployment = Deployment(
            model_dir=write_tiny_model(folder / "model", tokenizer_dir, DEEP),
            model_name=MODEL,
            cache=cache_root(),
            workers=2,
            memory_bytes=32 << 20,
            dtype="float32",
            paced="A100-14B",
            options=OPTIONS | {"api_keys": str(keys)},
        )
        system = Keyed("drop", (), deployment)
        try:
            system.start(lambda line: print(line, flush=True))
            with prometheus(binary, folder, system.targets) as url:
                wait_for_scrapes(url, system.targets)
                began_unix_s = time.time()
                load(system, key)
                return ask_all(url, began_unix_s)
        finally:
            system.stop()


def main() -> int:
    """0 when every query has numbers, 1 when one has none, 77 without Prometheus."""
    parser = argparse.ArgumentParser(description="Run every board's queries on a loaded cluster.")
    parser.add_argument("--fetch", action="store_true", help="unpack Prometheus if it is not here")
    reason = fetch() if parser.parse_args().fetch and find("prometheus") is None else None
    binary = find("prometheus")
    if binary is None:
        print(f"Prometheus is not here ({reason or 'run with --fetch'})")
        return UNAVAILABLE
    empty = check(binary)
    for line in empty:
        print(f"no number: {line}")
    print(f"{len(queries())} queries, {len(empty)} without a number")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
