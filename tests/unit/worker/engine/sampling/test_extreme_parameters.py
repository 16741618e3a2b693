"""Sampling parameters that the API accepts keep the logits finite, even at the extremes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.planner.batch import SampleSpec, SampleTerms
from services.core.request import REPETITION_PENALTY_MIN
from services.gateway.api.chat import parse_chat
from services.gateway.model.sampling import PLAIN_DEFAULTS, sampling_of
from services.gateway.vocabulary.errors import BadRequest
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampled, Sampler
from tests.support.sampling import NO_FOLDER

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LOGITS = [-3e4, -1.0, -1e-40, 0.0, 1e-40, 1e-3, 1.0, 3e4]
EXTREMES = [0.0, 5e-324, 1e-45, 1e-38, 1e-9, 1e-3, 0.01, 0.5, 1.0, 2.0, 1e38, 1e308, np.nan, np.inf]
NUMBERS = st.sampled_from([sign * value for value in EXTREMES for sign in (1, -1)]) | st.floats()
FIELDS = {
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "logit_bias": st.dictionaries(st.sampled_from("0347"), NUMBERS, max_size=2),
}


def accepted(fields: dict[str, Any]) -> dict[str, Any]:
    """The values that a request accepts for the fields."""
    kept = {}
    for name, value in fields.items():
        try:
            parse_chat(CHAT | {name: value})
        except BadRequest:
            continue
        kept[name] = value
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(fields=st.fixed_dictionaries({}, optional=FIELDS))
@settings(max_examples=150, deadline=None)
def test_logits_stay_finite(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    sampling = sampling_of(parse_chat(CHAT | accepted(fields) | {"seed": 1}), PLAIN_DEFAULTS, ())
    size = len(LOGITS)
    logits = torch.tensor([LOGITS], dtype=dtype)
    sampler, sampled = Sampler(size, Grammars(NO_FOLDER, size), dtype), Sampled()
    terms = SampleTerms(sampling, tuple(range(size)), (0, 3, 3, 7))
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        sampler.sample(logits, [("a", SampleSpec(terms, 4))], sampled)
    assert torch.isfinite(logits).all()
    assert 0 <= sampled.tokens["a"] < size


@pytest.mark.parametrize("penalty", [1e-45, 5e-324, 0.0099, float("nan"), float("inf")])
def test_repetition_penalties_below_the_minimum_are_refused(penalty: float) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(CHAT | {"repetition_penalty": penalty})
    assert caught.value.param == "repetition_penalty"
    parse_chat(CHAT | {"repetition_penalty": REPETITION_PENALTY_MIN})
