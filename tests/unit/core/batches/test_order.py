"""Lines with a common prefix run consecutively."""

import random
from itertools import groupby

from services.core.batches.order import BatchOrder, sort_key


def test_lines_with_a_common_beginning_are_adjacent() -> None:
    draw = random.Random(7)
    systems = [f"system {n} ".encode() * 20 for n in range(3)]
    shots = [f"examples {n} ".encode() * 100 for n in range(8)]
    lines = [
        (system, shot, f"question {draw.random()}".encode())
        for system in systems
        for shot in shots
        for _ in range(20)
    ]
    draw.shuffle(lines)
    lines.sort(key=lambda line: sort_key(BatchOrder.PREFIX, b"".join(line), 100))
    assert len(list(groupby(line[:1] for line in lines))) == len(systems)
    assert len(list(groupby(line[:2] for line in lines))) == len(systems) * len(shots)


def test_the_other_orders_are_by_length_or_by_line() -> None:
    keys = {order: sort_key(order, b"x", 70) for order in BatchOrder}
    assert keys[BatchOrder.FIFO] == 0
    assert keys[BatchOrder.SJF] > sort_key(BatchOrder.SJF, b"y", 69)
    assert keys[BatchOrder.LJF] < sort_key(BatchOrder.LJF, b"y", 69)


def test_keys_are_signed_integers_of_64_bits() -> None:
    draw = random.Random(9)
    for order in BatchOrder:
        for _ in range(200):
            key = sort_key(order, draw.randbytes(draw.randrange(9000)), draw.randrange(10**9))
            assert -(2**63) <= key < 2**63
