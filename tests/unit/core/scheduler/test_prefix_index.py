"""The index of cached prefixes, compared with a full scan."""

import random

import pytest

from services.core.prefix.block_hash import ThinHashes
from services.core.scheduler.prefix_index import PrefixIndex


class PlainIndex:
    """A reference index: a list of (hash, blocks) for each group, oldest first."""

    def __init__(self) -> None:
        self.held: dict[str, list[tuple[int, int]]] = {}
        self.capacity: dict[str, int] = {}

    def insert(self, group_id: str, prefix: ThinHashes) -> None:
        for hash_ in reversed(prefix.hashes):
            kept = [entry for entry in self.held[group_id] if entry[0] != hash_]
            self.held[group_id] = [*kept, (hash_, prefix.stride)]
        self.evict(group_id)

    def evict(self, group_id: str) -> None:
        while sum(blocks for _, blocks in self.held[group_id]) > self.capacity[group_id]:
            del self.held[group_id][0]

    def matched_blocks(self, group_id: str, prefix: ThinHashes) -> int:
        known = {hash_ for hash_, _ in self.held[group_id]}
        places = [place for place, hash_ in enumerate(prefix.hashes) if hash_ in known]
        return (places[-1] + 1) * prefix.stride if places else 0


def chat(rng: random.Random) -> ThinHashes:
    """A number of turns of one of six chats that start with one of two texts."""
    number, length = rng.randrange(6), rng.randrange(7)
    hashes = [number % 2 if place < 2 else 10 * number for place in range(length)]
    stride = rng.choice([8, 8, 16])
    return ThinHashes(stride, tuple(100 * place + hash_ for place, hash_ in enumerate(hashes)))


@pytest.mark.parametrize("seed", range(12))
def test_the_index_equals_a_full_scan(seed: int) -> None:
    rng = random.Random(seed)
    index, plain = PrefixIndex(), PlainIndex()
    matched = 0
    for _ in range(600):
        group_id, prefix = f"g{rng.randrange(5)}", chat(rng)
        action = rng.random()
        if group_id not in plain.held:
            plain.held[group_id], plain.capacity[group_id] = [], rng.choice([0, 40, 90, 300])
            index.join(group_id, plain.capacity[group_id])
        elif action < 0.03:
            del plain.held[group_id]
            index.leave(group_id)
        elif action < 0.1:
            plain.capacity[group_id] = rng.choice([0, 40, 90, 300])
            plain.evict(group_id)
            index.resize(group_id, plain.capacity[group_id])
        elif action < 0.25:
            dropped = prefix.hashes[rng.randrange(7) :]
            plain.held[group_id] = [
                entry for entry in plain.held[group_id] if entry[0] not in dropped
            ]
            index.remove_hashes(group_id, dropped)
        else:
            plain.insert(group_id, prefix)
            index.insert(group_id, prefix)
        index.check_invariants()
        expected = {group_id: plain.matched_blocks(group_id, prefix) for group_id in plain.held}
        assert {
            group_id: index.matched_blocks(group_id, prefix) for group_id in plain.held
        } == expected
        matches = list(index.by_longest_match(prefix))
        assert sorted(matches) == sorted(
            group_id for group_id, blocks in expected.items() if blocks
        )
        lengths = [expected[group_id] for group_id in matches]
        assert lengths == sorted(lengths, reverse=True)
        matched += bool(matches)
    assert matched > 300


def test_ties_go_to_the_latest_group() -> None:
    index, prefix = PrefixIndex(), ThinHashes(8, (1, 2))
    for group_id in ("b", "a", "c"):
        index.join(group_id, 100)
        index.insert(group_id, prefix)
    assert list(index.by_longest_match(ThinHashes(8, (1, 2, 3)))) == ["c", "a", "b"]


def test_long_and_short_prompts_share_prefixes() -> None:
    index = PrefixIndex()
    index.join("a", 1000)
    index.insert("a", ThinHashes(8, (1, 2, 3, 4)))  # blocks 8, 16, 24, 32
    assert index.matched_blocks("a", ThinHashes(16, (2, 4, 99))) == 32
    index.insert("a", ThinHashes(16, (2, 4, 6)))
    assert index.matched_blocks("a", ThinHashes(8, (1, 2, 3, 4, 5, 6))) == 48


def test_a_returning_group_has_no_prefixes() -> None:
    index, prefix = PrefixIndex(), ThinHashes(8, (1, 2))
    index.join("a", 100)
    index.insert("a", prefix)
    index.leave("a")
    index.join("a", 100)
    assert index.matched_blocks("a", prefix) == 0
    assert list(index.by_longest_match(prefix)) == []
