"""A request in the words of vLLM's sampling parameters (0.32). Pure: vLLM is not imported."""

from typing import Any

from services.core.request import GrammarKind, Limits, LogprobOptions, Request, Sampling

SEED_BITS = 63
"""vLLM takes signed seeds."""
_GRAMMAR_KEYS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
}


class CannotServe(ValueError):
    """vLLM cannot do what a request asks for; one sentence of cause and remedy."""


def parameters_of(request: Request) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`; a grammar as those of its `StructuredOutputsParams`.

    Stop tokens are ours alone: the model's own end-of-sequence tokens are among them if they shall
    end the request. Text is the gateway's, so nothing is detokenised.

    vLLM takes the output that a request came with for a part of the prompt. So presence and
    frequency penalties do not count it, and draws begin anew.

    Raises:
        CannotServe: for sequences of forbidden tokens: vLLM takes words and tokenises them itself.
            For a grammar of a request that comes with output: vLLM cannot begin in its middle.
    """
    if request.sampling.bad_words:
        raise CannotServe(
            "bad_words does not work where vLLM runs the model; use logit_bias with -100 for tokens"
            " that must not come"
        )
    if request.output_ids and request.sampling.grammar is not None:
        raise CannotServe(
            "vLLM cannot go on with an answer in the middle of a grammar; send the request again"
        )
    return {
        **_sampling(request.sampling),
        **_limits(request.limits, len(request.output_ids)),
        **_logprobs(request.logprobs),
        "ignore_eos": True,
        "detokenize": False,
    }


def _sampling(sampling: Sampling) -> dict[str, Any]:
    found: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.temperature:
        found["seed"] = sampling.seed % (1 << SEED_BITS)
    if sampling.logit_bias:
        found["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed_token_ids:
        found["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.grammar is not None:
        grammar = sampling.grammar
        found["structured_outputs"] = {_GRAMMAR_KEYS[grammar.kind]: grammar.text}
    return found


def _limits(limits: Limits, output: int) -> dict[str, Any]:
    """The limits of a request that has so much output."""
    return {
        "max_tokens": limits.max_tokens - output,
        "min_tokens": max(0, limits.min_tokens - output),
        "stop_token_ids": sorted(limits.stop_token_ids),
    }


def _logprobs(options: LogprobOptions) -> dict[str, Any]:
    return {"logprobs": options.output, "prompt_logprobs": options.prompt}
