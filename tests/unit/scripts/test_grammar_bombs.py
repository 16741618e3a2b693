"""What the script of grammar bombs sends and counts."""

import json

import grammar_bombs
from grammar_bombs import Seen


def test_what_came_while_a_bomb_was_in_the_house_is_told_apart() -> None:
    seen = Seen(bombs={"one": [(1.0, 2.0)], "other": [(1.5, 4.0)]})
    quiet, beside = seen.apart([(0.0, 0.5), (0.5, 1.25), (3.5, 5.0), (4.0, 4.25), (1.6, 1.7)])
    assert quiet == [0.5, 0.25]
    assert [round(one, 3) for one in beside] == [0.75, 1.5, 0.1]


def test_no_bomb_is_sent_twice() -> None:
    numbers = [next(grammar_bombs.numbers) for _ in range(20)]
    sent = [json.dumps(one) for number in numbers for one in grammar_bombs.bombs(number).values()]
    assert len(set(sent)) == len(sent) == 80
