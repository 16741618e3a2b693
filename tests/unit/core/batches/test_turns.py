"""Owners alternate by tokens, then by batch."""

import random
from collections import Counter

from services.core.batches.turns import BatchTurns


def test_owners_get_equal_tokens_for_any_number_of_batches() -> None:
    draw = random.Random(3)
    turns = BatchTurns()
    batches = {"alice": ["a1", "a2", "a3"], "bob": ["b1"]}
    turns.keep(batches)
    served: Counter[str] = Counter()
    for _ in range(3000):
        owner, batch = turns.order()[0]
        tokens = draw.randint(1, 100)
        turns.serve(owner, batch, tokens)
        served[owner] += tokens
        served[batch] += tokens
        turns.check_invariants()
    assert abs(served["alice"] - served["bob"]) <= 100
    own = [served[batch] for batch in batches["alice"]]
    assert max(own) - min(own) <= 100


def test_a_new_owner_neither_waits_nor_catches_up() -> None:
    turns = BatchTurns()
    turns.keep({"alice": ["a1"]})
    turns.serve("alice", "a1", 10_000)
    turns.keep({"alice": ["a1"], "bob": ["b1"]})
    turns.serve("bob", "b1", 10)
    assert turns.order() == [("alice", "a1"), ("bob", "b1")]
    turns.serve("alice", "a1", 11)
    assert turns.order() == [("bob", "b1"), ("alice", "a1")]


def test_a_single_batch_of_each_owner_comes_first() -> None:
    turns = BatchTurns()
    turns.keep({"alice": ["a1", "a2"], "bob": ["b1"], "carol": []})
    assert turns.order() == [("alice", "a1"), ("bob", "b1"), ("alice", "a2")]
    turns.keep({})
    assert turns.order() == []
    turns.serve("alice", "a1", 5)
    turns.check_invariants()
