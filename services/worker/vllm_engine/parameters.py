"""Converts requests to arguments of vLLM's `SamplingParams`. Pure: does not import vLLM."""

from typing import Any

from services.core.request import GrammarKind, Limits, LogprobOptions, Request, Sampling

SEED_BITS = 63
"""vLLM's seeds are signed 64-bit integers."""
_GRAMMAR_KEYS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
}


class CannotServe(ValueError):
    """vLLM cannot serve a request; the message has cause and remedy."""


class CannotResume(Exception):
    """The engine cannot continue the output of another worker; the request may start again."""


def parameters_of(request: Request, engine: str = "vLLM") -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`; for a grammar, those of `StructuredOutputsParams`.

    For vLLM, the output of a resumed request is part of its prompt. So presence and frequency
    penalties do not include it, and the random number generator starts again. Errors name `engine`.

    Raises:
        CannotServe: for `bad_words`, because vLLM tokenizes words itself.
        CannotResume: for a resumed request with a grammar, because vLLM cannot continue a partly
            matched grammar.
    """
    if request.sampling.bad_words:
        raise CannotServe(
            f"bad_words is not supported with {engine}; use logit_bias -100 for tokens to exclude"
        )
    if request.output_ids and request.sampling.grammar is not None:
        raise CannotResume(f"{engine} cannot resume a response in the middle of a grammar")
    return {
        **_sampling(request.sampling),
        **_limits(request.limits, len(request.output_ids)),
        **_logprobs(request.logprobs),
        # The gateway lists end-of-sequence tokens among the stop tokens if they end the request.
        "ignore_eos": True,
        # The gateway detokenizes.
        "detokenize": False,
    }


def _sampling(sampling: Sampling) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.temperature:
        arguments["seed"] = sampling.seed % (1 << SEED_BITS)
    if sampling.logit_bias:
        arguments["logit_bias"] = dict(sampling.logit_bias)
    if sampling.allowed_token_ids:
        arguments["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.grammar is not None:
        grammar = sampling.grammar
        arguments["structured_outputs"] = {_GRAMMAR_KEYS[grammar.kind]: grammar.text}
    return arguments


def _limits(limits: Limits, output: int) -> dict[str, Any]:
    """Limits of a request that has `output` tokens of output from earlier workers."""
    return {
        "max_tokens": limits.max_tokens - output,
        "min_tokens": max(0, limits.min_tokens - output),
        "stop_token_ids": sorted(limits.stop_token_ids),
    }


def _logprobs(options: LogprobOptions) -> dict[str, Any]:
    return {"logprobs": options.output, "prompt_logprobs": options.prompt}
