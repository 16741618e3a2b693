"""Sequences: the fast path for the next chunk of decodes, and whether host copies help."""

import pytest

from services.core.host.host_cache import HostCache
from services.core.planner.host_use import HostUse
from services.core.planner.sequence import Sequence
from services.core.request import Limits, LogprobOptions, Request, Sampling

PROMPT = (5, 6, 7)


@pytest.mark.parametrize("logprobs", [LogprobOptions(), LogprobOptions(prompt=2, output=1)])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(frequency_penalty=0.5), Sampling(repetition_penalty=1.1)],
)
def test_a_decode_is_the_chunk_of_the_last_token(
    sampling: Sampling, logprobs: LogprobOptions
) -> None:
    request = Request("r", PROMPT, sampling, Limits(9), 0.0, logprobs=logprobs)
    first, second = Sequence(request, 1, 0.0), Sequence(request, 1, 0.0)
    for sequence in (first, second):
        assert sequence.next_chunk(len(PROMPT), (3,)).sample is not None
        sequence.computed = len(PROMPT)
    for place in range(6):
        for sequence in (first, second):
            sequence.append(40 + place)
            if place == 3:
                sequence.reset_sampler()
        assert first.next_decode((3, 4)) == second.next_chunk(1, (3, 4))
        assert first.sampler_outputs == second.sampler_outputs == first.output_count
        for sequence in (first, second):
            sequence.computed += 1


@pytest.mark.parametrize("logprobs", [LogprobOptions(), LogprobOptions(prompt=0)])
def test_host_copies_help_no_request_whose_whole_prompt_runs_again(
    logprobs: LogprobOptions,
) -> None:
    request = Request("r", PROMPT, Sampling(temperature=0.0), Limits(9), 0.0, logprobs=logprobs)
    sequence, use = Sequence(request, 1, 0.0), HostUse(HostCache())
    sequence.block_hashes = [b"first"]
    sequence.registered = sequence.saved = 1
    assert sequence.is_saved is not logprobs.runs_prompt
    use.note_preempted(sequence, 1)
    assert use.is_owed(sequence) is not logprobs.runs_prompt
