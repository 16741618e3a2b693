"""Validation of a large input and its memory at a gateway, and the store's time per line."""

import asyncio
import json
import random
import time
from pathlib import Path

from services.gateway.batches.store import BatchStore
from tests.support.batch_store import begun_batch, result
from tests.support.batches import CHAT
from tests.support.client import open_client
from tests.support.control_plane import open_store
from tests.support.etcd_server import running_etcd
from tests.support.fake_cluster import fake_cluster
from tests.support.gateway import endless
from tests.support.gateway_process import gateway_process
from tests.support.waiting import eventually

LINES, BYTES = 50_000, 200 * 10**6
VALIDATED_WITHIN_S = 60.0
MEMORY_MAX_BYTES = 80 * 2**20
STORED = 6400
FINISH_MAX_S = 0.2e-3


def write_input(path: Path) -> None:
    """Write 50,000 lines of 200 MB in total: 8 shared prefixes, then distinct text."""
    draw = random.Random(1)
    vocabulary = [f"word{n}" for n in range(5000)]
    beginnings = [" ".join(draw.choices(vocabulary, k=120)) for _ in range(8)]
    with path.open("w") as file:
        for n in range(LINES):
            text = " ".join(draw.choices(vocabulary, k=280))
            messages = [
                {"role": "system", "content": draw.choice(beginnings)},
                {"role": "user", "content": text},
            ]
            body = {"model": "m", "messages": messages, "max_tokens": 64}
            data = {"custom_id": f"request-{n}", "method": "POST", "url": CHAT, "body": body}
            line = json.dumps(data)
            file.write(line + " " * (BYTES // LINES - len(line) - 1) + "\n")


def peak_bytes(pid: int) -> int:
    """The peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def test_a_large_input_is_validated_in_time_and_memory(tmp_path: Path) -> None:
    source = tmp_path / "input.jsonl"
    write_input(source)
    assert source.stat().st_size == BYTES
    with running_etcd() as etcd:
        async with (
            open_store(etcd.url) as store,
            fake_cluster(store, endless, max_model_len=8192) as cluster,
            gateway_process(
                cluster, tmp_path, batch_store=f"sqlite:///{tmp_path}/batches.db"
            ) as gateway,
            open_client(gateway.url) as client,
        ):
            # No line finishes, so no memory is used by results.
            cluster.workers[0].pause_at = 1
            before = gateway.rss
            file = await client.files.create(file=source, purpose="batch")
            uploaded = peak_bytes(gateway.process.pid)
            began_s = time.monotonic()
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )

            async def begun() -> bool:
                state = await client.batches.retrieve(batch.id)
                assert state.status in ("validating", "in_progress"), state.errors
                return state.status == "in_progress"

            await eventually(begun, deadline_s=240.0, interval_s=0.2)
            validated_s = time.monotonic() - began_s
            peak = peak_bytes(gateway.process.pid)
    print(
        f"validated in {validated_s:.1f} s; memory +{(uploaded - before) / 2**20:.0f} MiB by the"
        f" upload, +{(peak - before) / 2**20:.0f} MiB in all"
    )
    assert validated_s <= VALIDATED_WITHIN_S
    assert peak - before <= MEMORY_MAX_BYTES


async def test_the_stores_time_for_a_line(tmp_path: Path) -> None:
    costs = {"claim": 0.0, "finish": 0.0}

    def observe(name: str, seconds: float, failed: bool) -> None:
        costs[name] = costs.get(name, 0.0) + seconds

    store = BatchStore(f"sqlite:///{tmp_path}/batches.db", observe)
    token = await store.lead(1)
    batch_id = await begun_batch(store, token, STORED)
    body = b'{"choices": [' + b"x" * 1000 + b"]}"
    while lines := await store.lines.claim(token, batch_id, 64):
        results = [result(batch_id, line.line, body) for line in lines]
        assert all(await asyncio.gather(*(store.lines.finish(token, end) for end in results)))
    await store.close()
    print({name: f"{costs[name] / STORED * 1e3:.3f} ms per line" for name in ("claim", "finish")})
    assert costs["finish"] / STORED <= FINISH_MAX_S
