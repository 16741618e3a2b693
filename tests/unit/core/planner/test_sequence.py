"""A sequence's next chunk: that of a decode is made in a shorter way, and is the same."""

import pytest

from services.core.planner.sequence import Sequence
from services.core.request import Limits, LogprobOptions, Request, Sampling

PROMPT = (5, 6, 7)


@pytest.mark.parametrize("logprobs", [LogprobOptions(), LogprobOptions(prompt=2, output=1)])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(frequency_penalty=0.5), Sampling(repetition_penalty=1.1)],
)
def test_a_decode_is_the_chunk_of_the_token_that_remains(
    sampling: Sampling, logprobs: LogprobOptions
) -> None:
    request = Request("r", PROMPT, sampling, Limits(9), 0.0, logprobs=logprobs)
    one, other = Sequence(request, 1, 0.0), Sequence(request, 1, 0.0)
    for sequence in (one, other):
        assert sequence.next_chunk(len(PROMPT), (3,)).sample is not None
        sequence.computed = len(PROMPT)
    for place in range(6):
        for sequence in (one, other):
            sequence.append(40 + place)
            if place == 3:
                sequence.reset_sampler()
        assert one.next_decode((3, 4)) == other.next_chunk(1, (3, 4))
        assert one.sampler_outputs == other.sampler_outputs == one.output_count
        for sequence in (one, other):
            sequence.computed += 1
