"""Each start of a request has a name of its own, and one sequence answers a request."""

import random

import pytest

from services.core.planner.events import Command, EmitToken, RefuseRequest
from services.core.planner.sequence_names import SequenceNames, request_of
from services.core.request import FinishReason


def told(names: SequenceNames, *commands: Command) -> list[Command]:
    return list(names.told(commands))


@pytest.mark.parametrize("request_id", ["r", "a#b", "#", "r#w0.1"])
def test_a_name_tells_the_request_whatever_its_id(request_id: str) -> None:
    names = SequenceNames("w0")
    first, second = names.begin(request_id), names.begin(request_id)
    assert first != second
    assert request_of(first) == request_of(second) == request_id
    assert SequenceNames("w1").begin(request_id) not in (first, second)


def test_the_names_process_cannot_be_mistaken_for_a_part_of_the_id() -> None:
    with pytest.raises(ValueError, match="#"):
        SequenceNames("w#0")


def test_only_what_answers_is_told_and_its_last_word_ends_it() -> None:
    names = SequenceNames("w0")
    first = names.begin("r")
    assert told(names, EmitToken(first, 0, 7, None)) == [EmitToken("r", 0, 7, None)]
    second = names.begin("r")
    assert told(names, EmitToken(first, 1, 8, None)) == []
    names.end(first)
    last = EmitToken(second, 0, 7, FinishReason.STOP)
    after = EmitToken(second, 1, 8, None)
    assert told(names, last, after) == [EmitToken("r", 0, 7, FinishReason.STOP)]
    assert names.name_of("r") == ""
    third = names.begin("r")
    assert told(names, RefuseRequest(third, "no room")) == [RefuseRequest("r", "no room")]
    assert names.name_of("r") == ""


def test_who_was_adopted_is_known_until_another_one_begins() -> None:
    there, here = SequenceNames("w0"), SequenceNames("w1")
    name = there.begin("r")
    here.adopt(name)
    assert here.name_of("r") == name and here.was_adopted(name)
    assert not there.was_adopted(name)
    begun = here.begin("r")
    assert not here.was_adopted(name) and not here.was_adopted(begun)


def test_of_any_history_one_sequence_answers_a_request() -> None:
    """Compared with a list of what has happened to each request."""
    rng = random.Random(5)
    names, model, others = SequenceNames("w0"), dict[str, str](), SequenceNames("w1")
    for _ in range(2000):
        request_id = rng.choice("abc")
        match rng.choice(["begin", "adopt", "end", "late", "keep"]):
            case "begin":
                model[request_id] = names.begin(request_id)
            case "adopt":
                model[request_id] = others.begin(request_id)
                names.adopt(model[request_id])
            case "end":
                names.end(model.pop(request_id, ""))
            case "late":
                names.end(others.begin(request_id))
            case "keep":
                model = {name: one for name, one in model.items() if rng.random() < 0.7}
                names.keep_only(model.values())
        for one in "abc":
            assert names.name_of(one) == model.get(one, "")
