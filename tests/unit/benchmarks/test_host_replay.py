"""Replays through a two-level LRU, by example and against a reference cache."""

import random

from benchmarks.host_replay import Replay, count_hits, generated, replay, table
from benchmarks.prefix_count import TwoLevelLru
from tideserve.sim.workload import PREFIX_BLOCK_TOKENS, Arrival

B = PREFIX_BLOCK_TOKENS


def _arrivals(*prefixes: tuple[int, ...]) -> list[Arrival]:
    return [Arrival(0.0, B * len(ids) + 1, 1, ids) for ids in prefixes]


def test_a_prefix_that_the_device_evicts_is_found_in_host_memory() -> None:
    arrivals = _arrivals((1, 2), (3, 4), (5, 6), (1, 2))
    assert count_hits(arrivals, 2 * B, 0) == 0
    assert count_hits(arrivals, 2 * B, 2 * B) == 0  # 3 and 4 are in host memory
    assert count_hits(arrivals, 2 * B, 4 * B) == 2 * B


def test_the_last_token_of_a_full_block_prompt_is_not_a_hit() -> None:
    same = [Arrival(0.0, 2 * B, 1, (1, 2))] * 2
    assert count_hits(same, 8 * B, 0) == B


def test_two_levels_hit_as_much_as_a_reference_cache() -> None:
    """The oracle keeps the two levels as lists, most recent last."""
    rng = random.Random(5)
    levels, device, host = TwoLevelLru(6, 9), list[int](), list[int]()
    total = 0
    for _ in range(2_000):
        chain = [rng.randrange(4) * 10 + place for place in range(rng.randrange(1, 6))]
        want = 0
        while want < len(chain) and chain[want] in device + host:
            want += 1
        assert levels.hits(chain) == want
        total += want
        levels.use(chain)
        device = [block for block in device if block not in chain] + chain[::-1]
        host = [b for b in host if b not in chain] + [b for b in chain[::-1] if b in host]
        for block in device[:-6]:
            host = [other for other in host if other != block] + [block]
        device, host = device[-6:], host[-9:]
    assert total


def test_hits_grow_with_host_memory() -> None:
    for name, arrivals in generated(1).items():
        (row,) = replay(name, arrivals[:400], (200_000,))
        shares = [row.share(ratio) for ratio in row.hit_tokens]
        assert shares == sorted(shares) and shares[0] < shares[-1]


def test_the_table_has_a_row_for_each_replay() -> None:
    rows = table([Replay("a trace", 2, 1_000, 500, {0: 0, 1: 100, 4: 250, 16: 500})]).splitlines()
    assert rows[-1] == "| a trace | 2 | 500 | 0.0% | 10.0% | 25.0% | 50.0% |"
