"""Sampling parameters that vLLM gets for a request."""

from dataclasses import replace
from typing import Any

import pytest

from services.core.request import Grammar, GrammarKind, Limits, LogprobOptions, Request, Sampling
from services.worker.vllm_engine.parameters import CannotResume, CannotServe, parameters_of


def vllm_parameters(logprobs: LogprobOptions | None = None, **sampling: Any) -> dict[str, Any]:
    limits = Limits(9, 2, frozenset({7, 3}))
    options = logprobs or LogprobOptions()
    return parameters_of(Request("r", (1,), Sampling(**sampling), limits, 0.0, options))


def test_the_gateway_handles_stops_and_detokenization() -> None:
    parameters = vllm_parameters()
    assert (parameters["max_tokens"], parameters["min_tokens"], parameters["stop_token_ids"]) == (
        9,
        2,
        [3, 7],
    )
    assert parameters["ignore_eos"] is True and parameters["detokenize"] is False
    assert parameters["logprobs"] is None and parameters["prompt_logprobs"] is None


def test_fields_of_sampling_are_passed_on() -> None:
    given: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 11,
    }
    parameters = vllm_parameters(**given, logit_bias=((4, -1.0),), allowed_token_ids=(4, 5))
    assert given.items() <= parameters.items()
    assert (parameters["logit_bias"], parameters["allowed_token_ids"]) == ({4: -1.0}, [4, 5])


def test_seeds_are_reduced_to_the_range_of_vllm() -> None:
    assert vllm_parameters(temperature=1.0, seed=2**64 - 1)["seed"] == 2**63 - 1
    assert "seed" not in vllm_parameters(temperature=0.0, seed=3)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (GrammarKind.JSON_SCHEMA, "json"),
        (GrammarKind.REGEX, "regex"),
        (GrammarKind.LARK, "grammar"),
    ],
)
def test_grammars_use_llguidance_of_vllm(kind: GrammarKind, key: str) -> None:
    assert vllm_parameters(grammar=Grammar(kind, "text"))["structured_outputs"] == {key: "text"}


def test_log_probabilities_are_requested() -> None:
    parameters = vllm_parameters(LogprobOptions(output=0, prompt=3))
    assert (parameters["logprobs"], parameters["prompt_logprobs"]) == (0, 3)


def test_forbidden_sequences_are_refused_with_a_remedy() -> None:
    with pytest.raises(CannotServe, match=r"bad_words is not supported .* use logit_bias"):
        vllm_parameters(bad_words=((1, 2),))


def test_output_of_another_worker_counts_for_the_limits() -> None:
    limits = Limits(9, 6, frozenset())
    request = Request("r", (1,), Sampling(), limits, 0.0, output_ids=(2, 3, 4))
    parameters = parameters_of(request)
    assert (parameters["max_tokens"], parameters["min_tokens"]) == (6, 3)
    later = replace(request, output_ids=(2,) * 8)
    assert parameters_of(later)["min_tokens"] == 0


def test_an_answer_in_the_middle_of_a_grammar_is_refused() -> None:
    sampling = Sampling(grammar=Grammar(GrammarKind.REGEX, "a+"))
    with pytest.raises(CannotResume, match="middle of a grammar"):
        parameters_of(Request("r", (1,), sampling, Limits(9), 0.0, output_ids=(2,)))
