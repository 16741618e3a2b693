"""A sampler without logits that checks the specs it receives."""

import struct
from collections.abc import Collection
from dataclasses import dataclass, field

from services.core.logprobs import LogprobRows, joined
from services.core.planner.batch import (
    Batch,
    Chunk,
    PromptRows,
    SampleNotes,
    SampleSpec,
    SampleTerms,
)
from services.core.request import Request


def row_of(token_id: int, position: int, top: int) -> LogprobRows:
    """A row that encodes its token and position in place of log probabilities."""
    ids = struct.pack(f"<{1 + top}i", position, *range(top))
    values = struct.pack(f"<{1 + top}f", -float(token_id), *([-1.0] * top))
    return LogprobRows(top, ids, values)


def rows_of(token_ids: Collection[int], start: int, top: int) -> LogprobRows:
    """Rows of consecutive tokens, the first of which is at position `start`."""
    rows = [row_of(token, position, top) for position, token in enumerate(token_ids, start)]
    return joined([LogprobRows(top), *rows])


@dataclass
class SpecSampler:
    """Raises AssertionError if a spec lacks or repeats terms or output tokens."""

    terms: dict[str, SampleTerms] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def keep_only(self, known: Collection[str]) -> None:
        """Forget requests without blocks."""
        for name in [name for name in self.terms if name not in known]:
            del self.terms[name], self.outputs[name]

    def take(self, request: Request, spec: SampleSpec) -> SampleTerms:
        """Apply a spec; the known terms and output must then equal those of the request."""
        name = request.request_id
        if spec.terms is not None:
            self.terms[name], self.outputs[name] = spec.terms, list(spec.terms.output_ids)
            assert not spec.output_ids
        assert name in self.terms, f"the sampler has no terms of {name}"
        self.outputs[name] += spec.output_ids
        terms = self.terms[name]
        assert terms.sampling is request.sampling
        assert terms.prompt_ids == (request.prompt_ids if request.sampling.reads_prompt else ())
        assert terms.stop_ids == request.limits.stop_token_ids
        assert terms.min_tokens == request.limits.min_tokens
        assert terms.top_logprobs == request.logprobs.output
        if request.sampling.reads_output:
            assert len(self.outputs[name]) == spec.index
        else:
            assert not self.outputs[name]
        return terms

    def notes(
        self, batch: Batch, requests: dict[str, Request], sampled: dict[str, int]
    ) -> SampleNotes | None:
        """The requested log probabilities, as `rows_of` encodes them; None for none."""
        made = SampleNotes({}, {})
        for chunk in batch.chunks:
            request = requests[chunk.seq_id]
            if chunk.score is not None:
                made.prompt_logprobs[chunk.seq_id] = score(chunk, request)  # type: ignore[index]
            if chunk.sample is not None and request.logprobs.output is not None:
                position = len(request.prompt_ids) + chunk.sample.index
                made.logprobs[chunk.seq_id] = row_of(  # type: ignore[index]
                    sampled[chunk.seq_id], position, request.logprobs.output
                )
        return made or None


def score(chunk: Chunk, request: Request) -> PromptRows:
    """The prompt rows that a chunk requests, which must lie within it."""
    asked = chunk.score
    assert asked is not None
    start = chunk.start + asked.row + 1
    assert asked.row >= 0 and asked.row + len(asked.token_ids) <= len(chunk.token_ids)
    assert asked.token_ids == request.prompt_ids[start : start + len(asked.token_ids)]
    assert asked.top == request.logprobs.prompt
    return PromptRows(start, rows_of(asked.token_ids, start, asked.top))
