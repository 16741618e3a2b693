"""Verdict of the benchmark of prefix caches."""

from collections.abc import Sequence

import pytest

from benchmarks.host_level import WITH, WITHOUT, HostLevelRecord
from benchmarks.one_by_one import TurnAnswer
from benchmarks.prefix_count import CountedCache
from benchmarks.scenarios.prefix import (
    ANSWER_TOKENS,
    OFF,
    ON,
    QUESTION_TOKENS,
    TURNS,
    PrefixRecord,
    SimulatedLoad,
    chat,
    count_hits,
    foreign_hits,
    judge,
)
from tideserve.cli.errors import SystemUnavailable


class CachingServer:
    """Returns tokens that are derived from the prompt; its cache is a `CountedCache`."""

    def __init__(self, blocks: int, salted: bool = True) -> None:
        self.caches: dict[str, CountedCache] = {}
        self._blocks, self._salted = blocks, salted

    def ask(self, prompt_ids: Sequence[int], output_tokens: int, salt: str = "bench") -> TurnAnswer:
        cache = CountedCache(self._blocks)
        cache = self.caches.setdefault(salt if self._salted else "", cache)
        output = tuple(sum(prompt_ids) % 97 + place for place in range(output_tokens))
        cached = cache.request(prompt_ids, output)
        return TurnAnswer(len(prompt_ids), cached, 1e-3 * (len(prompt_ids) - cached), output)


def served(dispatch: str, share: float) -> SimulatedLoad:
    return SimulatedLoad("chats", dispatch, 1_000_000, share, 0.5, 2.0, 0)


def good() -> PrefixRecord:
    record = PrefixRecord({ON: [[1.0, 0.3]], OFF: [[1.0, 1.0]]}, 100, 1000, 500, 510)
    record.served += [served("least_loaded", 0.1), served("prefix", 0.3)]
    record.host = HostLevelRecord(
        *(4096, 16384, 5000),
        {WITH: 900, WITHOUT: 300},
        {WITH: 1000, WITHOUT: 320},
        {WITH: [0.1], WITHOUT: [0.2]},
        {WITH: [0.2], WITHOUT: [0.2]},
    )
    return record


def test_a_result_above_all_bars_has_no_problem() -> None:
    verdict = judge(good())
    assert verdict.problems == []
    assert verdict.figures["ttft_share"] == pytest.approx(0.3)
    assert verdict.figures["simulated_gains"] == {"chats, 1,000,000 tokens": pytest.approx(3.0)}


def test_each_bar_that_is_missed_is_a_problem() -> None:
    prefix_record = good()
    prefix_record.ttfts_s[ON] = [[1.0, 0.4]]
    prefix_record.hits, prefix_record.foreign_hits = 530 + 10, 16
    prefix_record.served[-1] = served("prefix", 0.15)
    problems = judge(prefix_record).problems
    assert [problem.split()[0] for problem in problems] == ["TTFT", "540", "16", "dispatch"]
    prefix_record.hits = 480
    assert any("-5.9%" in problem for problem in judge(prefix_record).problems)


def test_each_turn_repeats_the_conversation() -> None:
    server = CachingServer(1000)
    answers = chat(server, "x")  # type: ignore[arg-type]
    lengths = [(turn + 1) * QUESTION_TOKENS + turn * ANSWER_TOKENS for turn in range(TURNS)]
    assert [answer.prompt_tokens for answer in answers] == lengths
    assert answers[-1].cached_tokens == (lengths[-2] + ANSWER_TOKENS - 1) // 16 * 16


def test_hits_must_agree_with_the_independent_count() -> None:
    errors = []
    for blocks in (300, 150):
        prefix_record = PrefixRecord(capacity_blocks=300)
        count_hits(CachingServer(blocks), prefix_record, 80, 1, lambda line: None)  # type: ignore[arg-type]
        assert 0 < prefix_record.counted_hits < prefix_record.queries
        errors.append(prefix_record.hits / prefix_record.counted_hits - 1)
    assert errors[0] == 0
    assert errors[1] < -0.2


def test_cross_salt_hits_are_detected_and_zero_hits_prove_nothing() -> None:
    assert foreign_hits(CachingServer(100), 1) == 0  # type: ignore[arg-type]
    assert foreign_hits(CachingServer(100, salted=False), 1) > 0  # type: ignore[arg-type]
    with pytest.raises(SystemUnavailable, match="has no hits"):
        foreign_hits(CachingServer(0), 1)  # type: ignore[arg-type]
