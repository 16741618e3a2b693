"""Generated conversations: each turn's prompt begins with the turns before it."""

import random

import pytest

from tideserve.sim.workload import AGENTS, CHATS, PREFIX_BLOCK_TOKENS, Arrival, Conversations

KINDS = pytest.mark.parametrize("kind", [CHATS, AGENTS], ids=["chats", "agents"])


@KINDS
def test_the_same_seed_gives_the_same_requests(kind: Conversations) -> None:
    first, again, other = (kind.arrivals(0.5, 120, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert first == sorted(first)


@KINDS
def test_a_turn_has_all_whole_blocks_of_the_turn_before(kind: Conversations) -> None:
    arrivals = kind.arrivals(0.5, 200, random.Random(4))
    longest: dict[int, Arrival] = {}
    continued = 0
    for arrival in arrivals:
        assert len(arrival.prefix_ids) == arrival.prompt_tokens // PREFIX_BLOCK_TOKENS
        assert arrival.prompt_tokens + arrival.output_tokens <= kind.tokens_max
        for block in arrival.prefix_ids:
            before = longest.get(block)
            if before is not None and len(before.prefix_ids) <= len(arrival.prefix_ids):
                place = arrival.prefix_ids.index(block)
                assert before.prefix_ids[: place + 1] == arrival.prefix_ids[: place + 1]
                continued += 1
            longest[block] = arrival
    assert continued > len(arrivals)


@KINDS
def test_conversations_share_few_openings(kind: Conversations) -> None:
    arrivals = kind.arrivals(1.0, 200, random.Random(5))
    openings = {arrival.prefix_ids[0] for arrival in arrivals}
    assert kind.openings / 2 < len(openings) <= kind.openings


def test_prompts_share_exactly_the_blocks_of_their_ids() -> None:
    first, second = Arrival(0, 1500, 1, (7, 8)), Arrival(0, 1100, 1, (7, 9))
    first_ids, second_ids = first.prompt_ids(0), second.prompt_ids(1)
    assert (len(first_ids), len(second_ids)) == (1500, 1100)
    assert first_ids[:512] == second_ids[:512]
    assert not set(first_ids[512:]) & set(second_ids[512:])
    # The rest of equal prompts is their own.
    again = first.prompt_ids(2)
    assert again[:1024] == first_ids[:1024] and not set(again[1024:]) & set(first_ids[1024:])
