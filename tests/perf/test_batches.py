"""How long a large input is validated, what memory that takes, and what the store costs a line."""

import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

LINES, BYTES = 50_000, 200 * 10**6
MODEL = "m"
CHAT = "/v1/chat/completions"
VALIDATED_WITHIN_S = 60.0
MEMORY_MAX_BYTES = 80 * 2**20


def write_input(path: Path) -> None:
    """50,000 lines of 200 MB in all: 8 beginnings, then text that differs."""
    draw = random.Random(1)
    words = [f"word{n}" for n in range(5000)]
    beginnings = [" ".join(draw.choices(words, k=120)) for _ in range(8)]
    with path.open("w") as file:
        for n in range(LINES):
            text = " ".join(draw.choices(words, k=430))
            messages = [
                {"role": "system", "content": draw.choice(beginnings)},
                {"role": "user", "content": text},
            ]
            body = {"model": MODEL, "messages": messages, "max_tokens": 64}
            data = {"custom_id": f"request-{n}", "method": "POST", "url": CHAT, "body": body}
            line = json.dumps(data)
            file.write(line + " " * (BYTES // LINES - len(line) - 1) + "\n")


async def measure(folder: Path) -> dict[str, float]:
    """Validate the input, then claim and finish all its lines."""
    from services.gateway.batches.object_files import ObjectFiles
    from services.gateway.batches.rows import LineResult, NewBatch, NewFile
    from services.gateway.batches.store import BatchStore
    from services.gateway.batches.validation import BatchRules, validate

    costs = {"finish": 0.0}

    def observe(name: str, seconds: float, failed: bool) -> None:
        costs[name] = costs.get(name, 0.0) + seconds

    store = BatchStore(f"sqlite:///{folder}/batches.db", observe)
    files = ObjectFiles(str(folder / "objects"))
    token = await store.lead(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    file = NewFile("owner", "batch", "in", BYTES, "", "input.jsonl")
    row = await store.files.add(file)
    batch, _ = await store.create(NewBatch("owner", "k", CHAT, row.file_id, 86_400))
    late_s = 0.0
    done = asyncio.Event()

    async def watch() -> None:
        """How late the event loop runs."""
        nonlocal late_s
        while not done.is_set():
            began_s = time.monotonic()
            await asyncio.sleep(0.005)
            late_s = max(late_s, time.monotonic() - began_s - 0.005)

    watching = asyncio.create_task(watch())
    began_s = time.monotonic()
    await validate(store, files, token, batch, BatchRules(CHAT, LINES, lambda model: None))
    validated_s = time.monotonic() - began_s
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    done.set()
    await watching
    body = b'{"choices": [' + b"x" * 1000 + b"]}"
    ran = 0
    while lines := await store.lines.claim(token, batch.batch_id, 64):
        results = [LineResult(batch.batch_id, line.line, 200, "r", body) for line in lines]
        ran += sum(await asyncio.gather(*(store.lines.finish(token, end) for end in results)))
        if ran >= 6400:
            break
    await store.close()
    return {
        "validated_s": validated_s,
        "grown_bytes": grown,
        "late_s": late_s,
        "lines": ran,
        "claim_s": costs["claim"] / ran,
        "finish_s": costs["finish"] / ran,
    }


def test_a_large_input_is_validated_in_time_and_memory(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    write_input(tmp_path / "objects" / "input.jsonl")
    # A process of its own: the memory of pytest is not that of a gateway.
    command = [sys.executable, "-m", "tests.perf.test_batches", str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    measured = json.loads(printed)
    print(measured)
    assert measured["lines"] >= 6400
    assert measured["validated_s"] <= VALIDATED_WITHIN_S
    assert measured["grown_bytes"] <= MEMORY_MAX_BYTES
    assert measured["finish_s"] <= 0.2e-3


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(Path(sys.argv[1])))))
