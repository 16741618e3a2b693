"""Each start of a request has its own sequence name, and a single sequence answers a request."""

import random

import pytest

from services.core.planner.events import Command, EmitToken, MoveBlocks, RefuseRequest
from services.core.planner.sequence_ids import AnsweringSequences, SequenceIdSource, request_id_of
from services.core.request import FinishReason


class Engine(AnsweringSequences):
    """The sequence names of an engine, which creates those of sequences that start there."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.source = SequenceIdSource(process)

    def start(self, request_id: str) -> str:
        name = self.source.new_id(request_id)
        self.begin(name)
        return name


def forwarded(names: AnsweringSequences, *commands: Command) -> list[Command]:
    return [command for command in commands if names.filter_command(command)]


@pytest.mark.parametrize("request_id", ["r", "a#b", "#", "r#w0.1"])
def test_a_sequence_name_identifies_any_request_id(request_id: str) -> None:
    names = SequenceIdSource("w0")
    first, second = names.new_id(request_id), names.new_id(request_id)
    assert first != second
    assert request_id_of(first) == request_id_of(second) == request_id
    assert SequenceIdSource("w1").new_id(request_id) not in (first, second)


def test_the_process_in_a_name_is_unambiguous() -> None:
    with pytest.raises(ValueError, match="#"):
        SequenceIdSource("w#0")


def test_only_the_current_sequence_of_a_request_answers_and_its_end_is_final() -> None:
    names = Engine("w0")
    first = names.start("r")
    assert forwarded(names, EmitToken(first, 0, 7, None)) == [EmitToken(first, 0, 7, None)]
    second = names.start("r")
    assert forwarded(names, EmitToken(first, 1, 8, None)) == []
    names.end(first)
    last = EmitToken(second, 0, 7, FinishReason.STOP)
    after = EmitToken(second, 1, 8, None)
    assert forwarded(names, last, after) == [last]
    assert names.seq_id_of("r") == ""
    third = names.start("r")
    refusal = RefuseRequest(third, "no room")
    assert forwarded(names, refusal) == [refusal]
    assert names.seq_id_of("r") == ""
    assert forwarded(names, MoveBlocks(())) == [MoveBlocks(())], "that is for no client"


def test_an_adopted_sequence_is_known_until_another_one_begins() -> None:
    there, here = Engine("w0"), Engine("w1")
    name = there.start("r")
    here.adopt(name)
    assert here.seq_id_of("r") == name and here.was_adopted(name)
    assert not there.was_adopted(name)
    begun = here.start("r")
    assert not here.was_adopted(name) and not here.was_adopted(begun)


def test_random_histories_have_a_single_answering_sequence() -> None:
    """Compared with a log of each request's events."""
    rng = random.Random(5)
    names, model, others = Engine("w0"), dict[str, str](), Engine("w1")
    for _ in range(2000):
        request_id = rng.choice("abc")
        match rng.choice(["begin", "adopt", "end", "late", "keep"]):
            case "begin":
                model[request_id] = names.start(request_id)
            case "adopt":
                model[request_id] = others.start(request_id)
                names.adopt(model[request_id])
            case "end":
                names.end(model.pop(request_id, ""))
            case "late":
                names.end(others.start(request_id))
            case "keep":
                model = {name: asked for name, asked in model.items() if rng.random() < 0.7}
                names.keep_only(model.values())
        for asked in "abc":
            assert names.seq_id_of(asked) == model.get(asked, "")
