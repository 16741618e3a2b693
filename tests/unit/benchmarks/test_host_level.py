"""Counts and verdict of the comparison with and without host memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.host_level import (
    DEVICE_TOKENS,
    WITH,
    WITHOUT,
    HostLevelRecord,
    ask_fresh,
    figures_of,
    problems_of,
    rows_of,
    smaller,
    talk_all,
)
from benchmarks.one_by_one import TurnAnswer
from benchmarks.prefix_count import CountedCache
from benchmarks.systems.system import Deployment


class CachingServer:
    """Returns tokens that are derived from the prompt; its cache is a `CountedCache`."""

    def __init__(self, blocks: int, host_blocks: int = 0) -> None:
        self.cache = CountedCache(blocks, host_blocks=host_blocks)

    def ask(self, prompt_ids: Sequence[int], output_tokens: int, salt: str = "bench") -> TurnAnswer:
        output = tuple(sum(prompt_ids) % 97 + place for place in range(output_tokens))
        cached = self.cache.request(prompt_ids, output) if salt == "bench" else 0
        return TurnAnswer(len(prompt_ids), cached, 1e-3 * (len(prompt_ids) - cached), output)


def record_of_chats(host_blocks: int = 4 * 256) -> HostLevelRecord:
    record = HostLevelRecord(capacity_tokens=4096, host_tokens=4 * 4096)
    servers: Any = {WITH: CachingServer(256, host_blocks), WITHOUT: CachingServer(256)}
    counts = {WITHOUT: CountedCache(256), WITH: CountedCache(256, host_blocks=4 * 256)}
    talk_all(record, servers, counts, True, 1, lambda line: None)
    ask_fresh(record, servers, 6, 1, lambda line: None)
    return record


def test_exact_servers_agree_with_the_counts() -> None:
    record = record_of_chats()
    assert record.hits == record.counted
    assert record.hits[WITH] > 2 * record.hits[WITHOUT] > 0
    assert len(record.ttfts_s[WITH]) == len(record.ttfts_s[WITHOUT]) == 64
    assert problems_of(record) == []
    figures = figures_of(record)
    assert figures["hit_tokens"] == figures["independent_hit_tokens"] == record.hits[WITH]
    assert figures["hit_tokens_without"] == record.hits[WITHOUT]
    assert len(rows_of(record)) == 2


def test_a_tier_of_half_the_size_misses_the_bars() -> None:
    record = record_of_chats(host_blocks=100)
    assert record.hits[WITH] < 0.85 * record.counted[WITH]
    assert any("of the independent count" in problem for problem in problems_of(record))


def test_each_bar_that_is_missed_is_a_problem() -> None:
    record = record_of_chats()
    record.fresh_ttfts_s[WITH] = [2.0, 3.0]
    record.hits[WITHOUT] = record.hits[WITH]
    texts = problems_of(record)
    assert len(texts) == 2
    assert texts[0].startswith("host memory multiplies the hits by 1.00")
    assert "the median TTFT of prompts without reuse" in texts[1]
    record.hits[WITH] = 2 * record.counted[WITH]
    assert "2.00 of the independent count" in problems_of(record)[0]


@pytest.mark.parametrize(("tokens", "less"), [(DEVICE_TOKENS + 100, 100), (100, 0)])
def test_the_device_gets_less_memory_for_kv(tmp_path: Path, tokens: int, less: int) -> None:
    shape = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    deployment = Deployment(tmp_path, "m", tmp_path, 1, 1 << 30)
    taken = deployment.memory_bytes - smaller(deployment, tokens).memory_bytes
    assert taken == less * deployment.kv_bytes_per_token
