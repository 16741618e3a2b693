"""Engines with an integer model: helpers that start requests, change groups and check tokens."""

from typing import Any

from services.core.groups.layer_map import Stage
from services.core.request import Limits, Request, Sampling
from services.worker.engine.pipeline.member import Member
from tests.support.engine_group import EngineGroup
from tests.support.fake_model import LAYERS, expected_tokens

MERGED = [[Stage("w0", 0, 1), Stage("w1", 1, LAYERS)]]
TURNED = [[Stage("w1", 0, 2), Stage("w0", 2, LAYERS)]]
APART = [[Stage("w0", 0, LAYERS)], [Stage("w1", 0, LAYERS)]]
LONG = 12
"""Output tokens of a request that lasts through a change."""


def request(number: int, prompt: int = 9, output: int = LONG) -> Request:
    ids = tuple(3 + (7 * number + i) % 50 for i in range(prompt))
    return Request(f"r{number}", ids, Sampling(0.0), Limits(output), 0.0)


def start(group: EngineGroup, *requests: Request) -> None:
    for each in requests:
        group.start(each)


def merged_and_started(group: EngineGroup) -> EngineGroup:
    started(merged(group))
    return group


def started(group: EngineGroup, count: int = 4) -> None:
    """Start long requests and run until each has output."""
    start(group, *(request(number) for number in range(count)))
    group.run_until(lambda: all(len(stream.tokens) > 1 for stream in group.streams.values()))


def check_tokens(group: EngineGroup) -> None:
    """Finish, and check that outputs equal those of undisturbed runs."""
    group.end()
    for stream in group.streams.values():
        assert not stream.refused
        wanted = expected_tokens(stream.request.prompt_ids, stream.request.limits.max_tokens)
        assert stream.tokens == (wanted[: len(stream.tokens)] if stream.aborted else wanted)


def member(group: EngineGroup, name: str) -> Member:
    return group.engines[name].member


def memory(group: EngineGroup, name: str) -> Any:
    return group.engines[name].runner.stage_memory


def refusals(group: EngineGroup, attempt: str) -> list[str]:
    return [answer.error for answer in group.answers(attempt) if answer.error]


def failing(error: Exception) -> Any:
    def fail(*_args: object, **_named: object) -> None:
        raise error

    return fail


def merged(group: EngineGroup) -> EngineGroup:
    """Merge all workers into one pipeline, and settle."""
    group.reconfigure(MERGED)
    group.settle()
    return group
