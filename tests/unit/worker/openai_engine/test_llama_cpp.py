"""Bodies and events of llama.cpp's /completion; events are those of its server."""

from pathlib import Path
from typing import Any

import pytest

from services.core.request import (
    Grammar,
    GrammarKind,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
)
from services.worker.openai_engine.errors import UpstreamLost, UpstreamRefused
from services.worker.openai_engine.llama_cpp import MARGIN, LlamaCpp
from services.worker.openai_engine.output import StreamedLogprob, StreamPiece
from services.worker.openai_engine.retokenizer import Retokenizer
from services.worker.vllm_engine.parameters import parameters_of
from tests.support.tiny_models import write_tokenizer

EOS = 2


@pytest.fixture
def dialect(tmp_path: Path) -> LlamaCpp:
    write_tokenizer(tmp_path, 320)
    return LlamaCpp(Retokenizer(tmp_path), (EOS,))


def body_of(dialect: LlamaCpp, **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"sampling": Sampling(temperature=0), "limits": Limits(8)}
    request = Request("r", (5, 6), arrival_s=0.0, **(given | fields))
    return dialect.body(request.prompt_ids, parameters_of(request), request.cache_salt)


def test_a_body_overrides_llama_cpp_defaults(dialect: LlamaCpp) -> None:
    body = body_of(dialect)
    wanted = {"prompt": [5, 6], "n_predict": 8 + MARGIN, "temperature": 0, "top_k": 0}
    wanted |= {"top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": 10}
    wanted |= {"cache_prompt": True, "ignore_eos": True, "stream": True}
    wanted |= {"return_progress": True}
    assert wanted.items() <= body.items()
    assert not {"n_probs", "logit_bias", "json_schema", "seed"} & body.keys()


def test_request_fields_are_translated(dialect: LlamaCpp) -> None:
    body = body_of(
        dialect,
        sampling=Sampling(
            seed=2**40 + 1,
            logit_bias=((7, -1.5),),
            grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        ),
        limits=Limits(8, stop_token_ids=frozenset({EOS, 9})),
        logprobs=LogprobOptions(0),
        cache_salt="of a",
    )
    wanted = {"logit_bias": [[7, -1.5]], "json_schema": {"type": "object"}, "n_probs": 1}
    wanted |= {"cache_prompt": False, "ignore_eos": False, "seed": (2**40 + 1) % (2**32 - 1)}
    assert wanted.items() <= body.items()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": LogprobOptions(prompt=1)}, "log probabilities of the prompt"),
        ({"sampling": Sampling(allowed_token_ids=(4,))}, "allowed_token_ids"),
        ({"limits": Limits(8, 2)}, "min_tokens"),
        ({"sampling": Sampling(grammar=Grammar(GrammarKind.REGEX, "a"))}, "use a JSON schema"),
    ],
)
def test_unsupported_features_are_refused(
    dialect: LlamaCpp, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UpstreamRefused, match=message):
        body_of(dialect, **fields)


def event(text: str, token_ids: list[int], count: int, stop_type: str = "") -> dict[str, Any]:
    end = {"stop": True, "stop_type": stop_type} if stop_type else {"stop": False}
    return {"content": text, "tokens": token_ids, "tokens_predicted": count, **end}


def test_ids_that_the_stream_leaves_out_come_from_the_text(dialect: LlamaCpp) -> None:
    ids = Retokenizer.ids
    tokens = ids(dialect._retokenizer, "é")
    assert len(tokens) == 2
    read = dialect.reader()
    assert read(event("a", [40], 1)) == StreamPiece((40,))
    assert read(event("é", [tokens[1]], 3)) == StreamPiece(tokens)
    assert read(event("b", [41], 4)) == StreamPiece((41,))
    assert read(event("", [], 4, "eos")) == StreamPiece((), "stop")
    # Another stream starts counting at zero.
    assert dialect.reader()(event("", [], 0, "limit")) == StreamPiece((), "length")


def test_the_progress_of_the_prompt_names_its_cached_tokens(dialect: LlamaCpp) -> None:
    progress = {"total": 100, "cache": 40, "processed": 60, "time_ms": 3}
    piece = dialect.reader()(event("", [], 0) | {"prompt_progress": progress})
    assert piece == StreamPiece(cached_tokens=40)


def test_log_probabilities_are_parsed(dialect: LlamaCpp) -> None:
    tops = [{"id": 4, "logprob": -0.5}, {"id": 5, "logprob": -1.0}]
    row = {"id": 5, "logprob": -1.0, "top_logprobs": tops}
    piece = dialect.reader()(event("x", [5], 1) | {"completion_probabilities": [row]})
    assert piece.logprobs == ({4: StreamedLogprob(-0.5), 5: StreamedLogprob(-1.0, 2)},)


def test_stream_errors_are_classified(dialect: LlamaCpp) -> None:
    with pytest.raises(UpstreamRefused, match="too long"):
        dialect.reader()({"error": {"code": 400, "message": "too long"}})
    with pytest.raises(UpstreamLost):
        dialect.reader()({"error": {"code": 500, "message": "slot failed"}})
