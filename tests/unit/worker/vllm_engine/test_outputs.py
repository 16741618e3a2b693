"""vLLM's outputs as tokens, log probabilities and times."""

import pytest

from services.core.planner.events import EmitToken
from services.core.request import (
    FinishReason,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
    TokenLogprobs,
)
from services.worker.ipc import RequestTimes
from services.worker.vllm_engine.outputs import OutputReader, RequestFailed, times_of
from tests.support.fake_async_llm import (
    FakeCompletion,
    FakeLogprob,
    FakeMetrics,
    FakeOutput,
    output,
)


def reader(logprobs: LogprobOptions | None = None) -> OutputReader:
    options = logprobs or LogprobOptions()
    return OutputReader(Request("r", (1, 2, 3), Sampling(), Limits(9), 0.0, options))


def test_tokens_are_numbered_without_a_gap() -> None:
    read = reader()
    assert read.read(output(5)) == [EmitToken("r", 0, 5, None)]
    assert read.read(output()) == []
    assert read.read(output(6, 7, ended="length")) == [
        EmitToken("r", 1, 6, None),
        EmitToken("r", 2, 7, FinishReason.LENGTH),
    ]


def test_tokens_follow_those_that_a_request_came_with() -> None:
    request = Request("r", (1, 2), Sampling(), Limits(9), 0.0, output_ids=(3, 4))
    events = output(5)
    events.num_cached_tokens = 2
    assert OutputReader(request).read(events) == [EmitToken("r", 2, 5, None)]


@pytest.mark.parametrize(("first", "last", "wanted"), [(2, 2, [2, 0]), (0, 2, [0, 2])])
def test_cached_tokens_come_with_the_first_or_the_last_token(
    first: int, last: int, wanted: list[int]
) -> None:
    read = reader()
    middle, other = output(5), output(6, ended="length")
    middle.num_cached_tokens, other.num_cached_tokens = first, last
    assert [token.cached_tokens for token in read.read(middle) + read.read(other)] == wanted


def test_a_stop_token_is_the_last_token() -> None:
    assert reader().read(output(7, ended="stop")) == [EmitToken("r", 0, 7, FinishReason.STOP)]


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_an_unknown_finish_reason_is_a_failure(reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason):
        reader().read(output(7, ended=reason))


def test_an_end_without_a_token_is_a_failure() -> None:
    with pytest.raises(RequestFailed):
        reader().read(output(ended="stop"))


def test_top_tokens_are_ordered_and_may_lack_the_sampled_token() -> None:
    row = {5: FakeLogprob(-9.0, 40), 8: FakeLogprob(-0.5, 1), 2: FakeLogprob(-0.5, 2)}
    completion = FakeCompletion([5], None, [row])
    (token,) = reader(LogprobOptions(output=2)).read(FakeOutput([completion]))
    assert token.logprobs is not None
    assert token.logprobs.unpacked() == [TokenLogprobs(-9.0, 40, ((2, -0.5), (8, -0.5)))]


def test_log_probabilities_of_the_prompt_come_with_the_first_token() -> None:
    rows = [None, {2: FakeLogprob(-1.0, 1)}, {3: FakeLogprob(-2.0, 4), 9: FakeLogprob(-0.5, 1)}]
    read = reader(LogprobOptions(prompt=1))
    first, second = read.read(FakeOutput([FakeCompletion([5, 6])], rows))
    assert first.prompt_logprobs is not None and first.logprobs is None
    assert first.prompt_logprobs.unpacked() == [
        TokenLogprobs(-1.0, 1, ((2, -1.0),)),
        TokenLogprobs(-2.0, 4, ((9, -0.5),)),
    ]
    assert second.prompt_logprobs is None


def test_the_first_token_reports_cached_tokens() -> None:
    read = reader()

    def cached(step_output: FakeOutput, cached_tokens: int | None) -> list[int]:
        step_output.num_cached_tokens = cached_tokens
        return [token.cached_tokens for token in read.read(step_output)]

    assert cached(output(), 2) == [], "a part of the prompt, without a token"
    assert cached(output(5, 6), 2) == [2, 0]
    assert cached(output(7), 2) == [0]
    read = reader()
    assert cached(output(5), None) == [0]


def test_times_are_derived_from_timestamps() -> None:
    assert times_of(FakeMetrics()) == RequestTimes(2.0, 4.0, 8.0)
    assert times_of(None) is None
