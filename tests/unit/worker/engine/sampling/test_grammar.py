"""Grammars over real tokenizers: allowed tokens, ends of output, refused grammars."""

import json
import random
from dataclasses import replace
from pathlib import Path
from threading import Event, get_ident

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from services.core.planner.batch import SampleSpec, SampleTerms
from services.core.request import Grammar, GrammarKind, Sampling
from services.worker.engine.sampling import grammar as grammar_module
from services.worker.engine.sampling.grammar import (
    COMPILED_MAX,
    GrammarRefused,
    Grammars,
    Unusable,
    Usable,
)
from services.worker.engine.sampling.sampler import Sampled, Sampler
from tests.support.sampling import NO_FOLDER, choose
from tests.support.tiny_models import EOS_TOKEN_ID, make_tiny_model

VOCAB = 320
ROWS = 352
"""Rows of logits: more than the tokenizer has tokens, as many models have."""
STOP = frozenset({EOS_TOKEN_ID})
GREEDY = Sampling(temperature=0.0)


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny"), vocab=VOCAB, layers=1, hidden=8, heads=1, kv_heads=1
    )


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture
def grammars(model_dir: Path) -> Grammars:
    return Grammars(model_dir, ROWS)


def allowed_after(grammars: Grammars, grammar: Grammar, ids: list[int], stops=STOP) -> set[int]:
    matcher = grammars.matcher(grammar, stops)
    matcher.consume(ids)
    return set(np.flatnonzero(matcher.allowed_tokens().mask).tolist())


def test_stop_tokens_may_come_where_the_grammar_accepts(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    a, b = tokenizer.encode("ab").ids
    assert allowed_after(grammars, regex("a+b?"), []) == {a}
    assert allowed_after(grammars, regex("a+b?"), [a]) == {a, b, EOS_TOKEN_ID}
    assert allowed_after(grammars, regex("a+b?"), [a, b]) == {EOS_TOKEN_ID}


def test_the_stop_tokens_are_those_of_the_request(grammars: Grammars, tokenizer: Tokenizer) -> None:
    a, b, x = tokenizer.encode("abx").ids
    stops = frozenset({x, 1})
    assert allowed_after(grammars, regex("a+b?"), [a], stops) == {a, b, x, 1}
    assert allowed_after(grammars, regex("ab"), [a, b], stops) == {x, 1}
    assert allowed_after(grammars, regex("a+"), [a], frozenset()) == {a}, "it need not end"
    assert allowed_after(grammars, regex("a"), [a], frozenset()) == {EOS_TOKEN_ID}
    # It runs on without a stop token: only ends follow, however many.
    assert allowed_after(grammars, regex("a"), [a, EOS_TOKEN_ID, 2], frozenset()) == {EOS_TOKEN_ID}


def test_rows_beyond_the_tokenizer_are_never_chosen(model_dir: Path, grammars: Grammars) -> None:
    assert max(allowed_after(grammars, regex("(.|\n)*"), [])) < VOCAB
    logits = torch.zeros(1, ROWS)
    logits[0, VOCAB:] = 50.0
    terms = SampleTerms(replace(GREEDY, grammar=regex(".*")), stop_ids=STOP)
    assert choose(logits, [terms], model_dir=model_dir).tokens["0"] < VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_a_random_model_follows_the_schema(
    model_dir: Path, tokenizer: Tokenizer, temperature: float, filters: dict[str, float]
) -> None:
    """Random logits; incremental history equals whole history."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "kind": {"enum": ["x", "yy"]},
            "counts": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["name", "kind", "counts"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    for seed in range(4):
        sampling = Sampling(temperature, seed=seed, grammar=grammar, **filters)
        sampler, output = Sampler(ROWS, Grammars(model_dir, ROWS), torch.float32), []
        while output[-1:] != [EOS_TOKEN_ID]:
            assert len(output) < 200
            generator = torch.Generator().manual_seed(1000 * seed + len(output))
            logits = 3 * torch.randn(1, ROWS, generator=generator)
            at_once = choose(
                logits, [SampleTerms(sampling, (), tuple(output), STOP)], model_dir=model_dir
            )
            terms = None if output else SampleTerms(sampling, stop_ids=STOP)
            made, spec = Sampled(), SampleSpec(terms, len(output), tuple(output[-1:]))
            sampler.sample(logits.clone(), [("a", spec)], made)
            assert made.tokens["a"] == at_once.tokens["0"]
            output.append(made.tokens["a"])
        written = json.loads(tokenizer.decode(output[:-1]))
        assert list(written) == ["name", "kind", "counts"]
        assert len(written["name"]) <= 5 and written["kind"] in ("x", "yy")
        assert (
            all(0 <= count <= 99 for count in written["counts"])
            and 1 <= len(written["counts"]) <= 3
        )


def test_the_end_of_a_grammar_comes_before_min_tokens_and_other_rules(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    a, b = tokenizer.encode("ab").ids
    sampling = replace(GREEDY, grammar=regex("ab?"), bad_words=((EOS_TOKEN_ID,),))
    terms = SampleTerms(sampling, (), (a, b), STOP, min_tokens=9)
    assert choose(torch.randn(1, ROWS), [terms], model_dir=model_dir).tokens == {"0": EOS_TOKEN_ID}
    # Where something else can follow, stop tokens wait for min_tokens.
    terms = replace(terms, output_ids=(a,))
    assert choose(torch.randn(1, ROWS), [terms], model_dir=model_dir).tokens == {"0": b}


def test_rules_that_contradict_the_grammar_fail_the_request(
    model_dir: Path, tokenizer: Tokenizer
) -> None:
    (a,) = tokenizer.encode("a").ids
    sampling = replace(GREEDY, grammar=regex("a"), bad_words=((a,),))
    made = choose(torch.randn(1, ROWS), [SampleTerms(sampling)], model_dir=model_dir)
    assert not made.tokens and "no token is left" in made.failed["0"]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (regex("a("), "unclosed group"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "grammar"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[]"), "grammar"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "str"}'), "Invalid type: str"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"not": {}}'), "Unimplemented keys"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/x"}'), "does not fetch"),
        (Grammar(GrammarKind.LARK, "start: missing"), "grammar"),
    ],
)
def test_unusable_grammars_are_refused_with_an_error(
    grammars: Grammars, grammar: Grammar, message: str
) -> None:
    with pytest.raises(GrammarRefused, match=message) as refused:
        grammars.matcher(grammar, STOP)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert grammars.check(grammar) == Unusable(str(refused.value))
    # A sampler that meets it fails the request, and no other.
    terms = [SampleTerms(replace(GREEDY, grammar=grammar)), SampleTerms(GREEDY)]
    made = choose(torch.randn(2, ROWS), terms, model_dir=grammars._model_dir)
    assert set(made.failed) == {"0"} and set(made.tokens) == {"1"}


@pytest.mark.parametrize("text", ["(a+)+", "(a{1,1000}){1,1000}", ".*x.{400}"])
def test_catastrophic_expressions_match_in_linear_time(grammars: Grammars, text: str) -> None:
    assert grammars.check(regex(text)) == Usable()


def test_work_that_grows_beyond_bounds_fails_the_request_that_does_it(
    model_dir: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The excess occurs only after some tokens and cannot be predicted by a check."""
    limits = LLParserLimits(max_lexer_states=100, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "PARSER_LIMITS", limits)
    ids, rng = tokenizer.encode("ab").ids, random.Random(0)
    growing = replace(GREEDY, grammar=regex("[ab]*a[ab]{18}"))
    sampler, output = Sampler(ROWS, Grammars(model_dir, ROWS), torch.float32), []
    failed: dict[str, str] = {}
    while not failed and len(output) < 500:
        logits = torch.zeros(2, ROWS)
        logits[0, rng.choice(ids)] = 9.0
        terms = None if output else SampleTerms(growing)
        specs = [
            ("growing", SampleSpec(terms, len(output), tuple(output[-1:]))),
            ("other", SampleSpec(SampleTerms(GREEDY), 0)),
        ]
        made = Sampled()
        sampler.sample(logits, specs, made)
        assert "other" in made.tokens
        failed = made.failed
        output += [made.tokens["growing"]] if not failed else []
    assert len(output) > 1
    assert set(failed) == {"growing"} and "too many states" in failed["growing"]


def test_a_model_without_a_usable_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(GrammarRefused, match="tokenizer allows no grammars"):
        Grammars(NO_FOLDER, ROWS).matcher(regex("a"), STOP)
    (tmp_path / "tokenizer.json").write_text("{}")
    verdict = Grammars(tmp_path, ROWS).check(regex("a"))
    assert isinstance(verdict, Unusable) and "tokenizer allows no grammars" in verdict.reason


def test_few_compiled_grammars_are_kept(grammars: Grammars) -> None:
    made = [regex(f"a{{{number}}}") for number in range(1, COMPILED_MAX + 4)]
    for grammar in made:
        assert grammars.check(grammar) == Usable()
        grammars.compile(made[0])
    assert grammars.cached_verdict(made[0]) == Usable(), "it is used all the time"
    assert sum(grammars.cached_verdict(grammar) is not None for grammar in made) == COMPILED_MAX
    assert grammars.cached_verdict(made[1]) is None


def test_a_lexer_filled_by_other_requests_is_rebuilt(
    model_dir: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allowed output of a request must not depend on earlier requests."""
    limits = LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "PARSER_LIMITS", limits)
    grammars = Grammars(model_dir, ROWS)
    grammar = regex("[ab]*a[ab]{8}")
    a, b = tokenizer.encode("ab").ids
    built: list[Grammar] = []
    real = grammar_module._build_matcher

    def counted(tokenizer: grammar_module.LLTokenizer, wanted: Grammar) -> object:
        built.append(wanted)
        return real(tokenizer, wanted)

    monkeypatch.setattr(grammar_module, "_build_matcher", counted)
    rng = random.Random(0)
    for _ in range(60):
        matcher = grammars.matcher(grammar, STOP)
        for _ in range(20):
            matcher.consume([rng.choice((a, b))])
            assert {a, b} <= set(np.flatnonzero(matcher.allowed_tokens().mask).tolist())
    assert 1 < len(built) < 60


def test_a_grammar_that_is_needed_soon_is_compiled_by_another_thread_and_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(model_dir, ROWS)
    built: list[tuple[Grammar, int]] = []
    real, may_go = grammar_module._build_matcher, Event()

    def noted(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
        built.append((grammar, get_ident()))
        assert may_go.wait(60)
        return real(tokenizer, grammar)

    monkeypatch.setattr(grammar_module, "_build_matcher", noted)
    good, bad = regex("a+"), regex("a(")
    for _ in range(2):
        grammars.start_compiling(good)
        grammars.start_compiling(bad)
    may_go.set()
    assert grammars.matcher(good, STOP).allowed_tokens().mask.any()
    with pytest.raises(GrammarRefused, match="unclosed group"):
        grammars.compile(bad)
    grammars.start_compiling(good)
    assert [grammar for grammar, _ in built] == [good, bad]
    assert get_ident() not in {thread for _, thread in built}
