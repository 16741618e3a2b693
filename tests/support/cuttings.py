"""Splits of texts into chunks, and merging of the resulting events."""

from collections.abc import Iterable, Iterator
from random import Random

from services.gateway.tools.event import CallArguments, Content, Event, Parser, Reasoning


def cuttings(text: str, seed: int, count: int = 20) -> Iterator[list[str]]:
    """The text whole, in single characters, and in `count` random splits."""
    yield [text]
    yield list(text)
    rng = Random(seed)
    for _ in range(count):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
        yield [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def merged(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of one kind joined; none may be empty."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        assert not isinstance(event, (Content, Reasoning, CallArguments)) or event.text
        match last, event:
            case Content(), Content():
                joined[-1] = Content(last.text + event.text)
            case Reasoning(), Reasoning():
                joined[-1] = Reasoning(last.text + event.text)
            case CallArguments(), CallArguments():
                joined[-1] = CallArguments(event.index, last.text + event.text)
            case _:
                joined.append(event)
    return joined


def parsed(parser: Parser, pieces: Iterable[str]) -> list[Event]:
    """All events that a parser returns for the pieces."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.finish())
