"""`transformers` as a reference for our engine's tokens and log probabilities.

Uses its processors and warpers where available, and OpenAI's formula for presence and frequency.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.core.request import Request, Sampling, TokenLogprobs
from tests.support.sampling import uniform


def processors(sampling: Sampling) -> LogitsProcessorList:
    """Processors in our engine's order; presence and frequency follow the first."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    if sampling.logit_bias:
        bias = [[[token], value] for token, value in sampling.logit_bias]
        chain.append(SequenceBiasLogitsProcessor(bias))
    if sampling.bad_words:
        chain.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    return chain


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """Warpers applied before the draw."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain


@dataclass
class Reference:
    """`transformers`, for one request at a time."""

    model: transformers.PreTrainedModel

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab]"""
        return self.model(torch.tensor([tokens])).logits[0]

    def next_token(self, request: Request, output: list[int], logits: torch.Tensor) -> int:
        """The token after `output`, from the raw logits of the last position."""
        sampling = request.sampling
        row = self.processed(request, output, logits)
        if sampling.temperature == 0:
            return int(row.argmax())
        weights = self.weights(request, output, row)
        order = torch.arange(len(weights))
        if sampling.top_k or sampling.top_p < 1:
            order = torch.argsort(weights, descending=True, stable=True)
        mass = weights[order].cumsum(0)
        draw = uniform(sampling.seed, len(output)) * mass[-1]
        return int(order[int(torch.searchsorted(mass, draw, right=True))])

    def weights(self, request: Request, output: list[int], row: torch.Tensor) -> torch.Tensor:
        """Probabilities after all filters."""
        history = torch.tensor([[*request.prompt_ids, *output]])
        return torch.softmax(warpers(request.sampling)(history, row[None])[0].double(), -1)

    def processed(self, request: Request, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        """A row of logits after penalties, bias and token bans."""
        sampling = request.sampling
        history = torch.tensor([[*request.prompt_ids, *output]])
        first, *others = processors(sampling)
        row = first(history, logits[None])
        for token, count in Counter(output).items():
            row[0, token] -= count * sampling.frequency_penalty + sampling.presence_penalty
        row = LogitsProcessorList(others)(history, row)
        if sampling.allowed_token_ids:
            kept = list(sampling.allowed_token_ids)
            row = torch.full_like(row, -torch.inf).index_copy_(1, torch.tensor(kept), row[:, kept])
        if len(output) < request.limits.min_tokens:
            row[0, list(request.limits.stop_token_ids)] = -torch.inf
        return row[0]

    @torch.inference_mode()
    def answer(self, request: Request) -> list[int]:
        """The complete output."""
        output: list[int] = []
        made = self.model(torch.tensor([request.prompt_ids]), use_cache=True)
        while True:
            output.append(self.next_token(request, output, made.logits[0, -1]))
            ended = output[-1] in request.limits.stop_token_ids
            if ended or len(output) == request.limits.max_tokens:
                return output
            last = torch.tensor([output[-1:]])
            made = self.model(last, past_key_values=made.past_key_values, use_cache=True)

    def check_logprobs(
        self,
        request: Request,
        output: list[int],
        prompt_told: list[TokenLogprobs] | None,
        output_rows: list[TokenLogprobs],
        tolerance: float = 1e-5,
    ) -> None:
        """Check rows of prompt and output against a log-softmax of the raw logits.

        The top tokens may differ where their values are within `tolerance` of each other.
        """
        prompt, asked = list(request.prompt_ids), request.logprobs
        tokens = prompt + output
        logprobs = torch.log_softmax(self.logits(tokens).double(), -1)
        rows = [*(prompt_told or []), *output_rows]
        first = 1 if asked.prompt is not None else len(prompt)
        end = len(tokens) if asked.output is not None else len(prompt)
        assert len(rows) == end - first
        for position, reported in enumerate(rows, first):
            top = asked.prompt if position < len(prompt) else asked.output
            assert top is not None
            check_row(reported, logprobs[position - 1], tokens[position], top, tolerance)


def check_row(
    reported: TokenLogprobs, row: torch.Tensor, token: int, top: int, tolerance: float
) -> None:
    """Check the row of a token against the log probabilities of all tokens."""
    own = row[token]
    assert reported.logprob == pytest.approx(float(own), abs=tolerance)
    more, as_likely = int((row > own + tolerance).sum()), int((row > own - tolerance).sum())
    assert 1 + more <= reported.rank <= as_likely
    top_logprobs = [logprob for _, logprob in reported.top]
    assert top_logprobs == pytest.approx(torch.topk(row, top).values.tolist(), abs=tolerance)
    assert top_logprobs == pytest.approx(
        [float(row[token_id]) for token_id, _ in reported.top], abs=tolerance
    )
    assert len({token_id for token_id, _ in reported.top}) == top
