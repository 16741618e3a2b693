"""Prompt tokens per second of a batch with shared prefixes: ordered by prefix, and in file order.

The prefixes together are three times the KV cache, so in file order most are evicted before they
are reused.
"""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

from tests.support.batches import as_file, ended, submit
from tests.support.client import open_client
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually

ENDPOINT = "/v1/completions"
DEVICE = "A100-14B"
MEMORY = "24MiB"
BLOCK_TOKENS = 16
BEGINNING_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 1024, 64, 4
LINES_PER_BEGINNING = 4
OVERFLOW = 3
RATIO_MIN = 1.3
BATCH_S = 600.0


def lines_of(beginnings: int) -> list[dict[str, Any]]:
    """Lines in random order."""
    draw = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 200) for _ in range(count)]

    prompts = [tokens(BEGINNING_TOKENS) for _ in range(beginnings)] * LINES_PER_BEGINNING
    draw.shuffle(prompts)
    return [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {
                "model": "m",
                "prompt": prompt + tokens(OWN_TOKENS),
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
            },
        }
        for number, prompt in enumerate(prompts)
    ]


async def rate_of(cluster: Cluster, beginnings: int) -> tuple[float, float]:
    """Prompt tokens per second of a batch, and their cached share."""
    async with open_client(cluster.url) as client:
        batch = await submit(client, as_file(lines_of(beginnings)), ENDPOINT)

        async def running() -> bool:
            return (await client.batches.retrieve(batch.id)).status != "validating"

        await eventually(running)
        began_s = time.monotonic()
        batch = await ended(client, batch.id, BATCH_S)
        seconds = time.monotonic() - began_s
        assert batch.status == "completed" and batch.error_file_id is None
        assert batch.usage is not None
        usage = batch.usage
        cached = usage.input_tokens_details.cached_tokens / usage.input_tokens
        return usage.input_tokens / seconds, cached


def test_the_order_by_prefix_hits_cached_prefixes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", max_model_len=2048)
    rates = {}
    for order in ("fifo", "prefix"):
        with Cluster(
            model_dir=folder,
            model_name="m",
            memory=MEMORY,
            workers=1,
            paced=DEVICE,
            overload_policy="recompute",
            gateway={"batch_order": order},
        ) as cluster:
            capacity = cluster.kv_blocks("kv_blocks_total") * BLOCK_TOKENS
            beginnings = OVERFLOW * capacity // BEGINNING_TOKENS
            rates[order], cached = asyncio.run(rate_of(cluster, beginnings))
            print(
                f"{order}: {rates[order]:,.0f} prompt tokens/s, {cached:.0%} cached;"
                f" {beginnings} beginnings, {capacity:,} tokens of KV"
            )
    print(f"prefix / fifo: {rates['prefix'] / rates['fifo']:.2f}")
    assert rates["prefix"] >= RATIO_MIN * rates["fifo"]
