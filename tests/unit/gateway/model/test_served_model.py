"""Files that a gateway reads of a model folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.gateway.model.sampling import PLAIN_DEFAULTS, SamplingDefaults
from services.gateway.model.served_model import load_model
from services.gateway.vocabulary.errors import BadRequest
from tests.support.byte_tokenizer import VOCAB_SIZE, write_model_folder


def folder(tmp_path: Path, **advice: Any) -> Path:
    """A model folder with this generation_config.json."""
    write_model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(advice))
    return tmp_path


@pytest.mark.parametrize(
    ("advice", "defaults"),
    [
        ({}, PLAIN_DEFAULTS),
        ({"do_sample": True, "top_p": None, "transformers_version": "5"}, PLAIN_DEFAULTS),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
            SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20),
        ),
        (
            {"min_p": 0, "repetition_penalty": 1.05, "max_new_tokens": 2048},
            SamplingDefaults(repetition_penalty=1.05, max_tokens=2048),
        ),
        ({"top_k": -1}, PLAIN_DEFAULTS),
        ({"top_k": 10**6}, SamplingDefaults(top_k=VOCAB_SIZE)),
    ],
)
def test_sampling_defaults_are_read_from_the_folder(
    tmp_path: Path, advice: dict[str, Any], defaults: SamplingDefaults
) -> None:
    assert load_model("m", folder(tmp_path, **advice)).defaults == defaults
    plain = load_model("m", folder(tmp_path, **advice), own_defaults=False)
    assert plain.defaults == PLAIN_DEFAULTS


def test_a_folder_without_generation_config_has_no_defaults(tmp_path: Path) -> None:
    assert load_model("m", write_model_folder(tmp_path)).defaults == PLAIN_DEFAULTS


def test_a_text_beyond_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_model_folder(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 10}))
    tokenizer = load_model("m", tmp_path).tokenizer
    assert tokenizer.encode("<|im_end|>", False, 10) == [2]
    with pytest.raises(BadRequest, match="'messages' contains the token 'a', which") as caught:
        tokenizer.encode("a", False, 10, param="messages")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "advice",
    [
        {"temperature": 3},
        {"temperature": "1"},
        {"top_p": 0},
        {"top_p": True},
        {"top_k": 1.5},
        {"min_p": -1},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-45},
        {"max_new_tokens": 0},
    ],
)
def test_an_invalid_generation_config_is_refused(tmp_path: Path, advice: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(advice))}.*'generation_config' to none"):
        load_model("m", folder(tmp_path, **advice))
    load_model("m", folder(tmp_path, **advice), own_defaults=False)


def test_aliases_are_listed_without_duplicates(tmp_path: Path) -> None:
    model = load_model("m", folder(tmp_path), ["b", "m", "a", "b"])
    assert model.names == ("m", "b", "a")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", -5),
        ("vocab_size", 10**12),
        ("vocab_size", True),
        ("max_position_embeddings", None),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", 10**18),
    ],
)
def test_invalid_model_sizes_are_refused(tmp_path: Path, key: str, value: object) -> None:
    path = write_model_folder(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=f"{key} is {value}, but must be 1 to"):
        load_model("m", tmp_path)


def test_a_too_deeply_nested_file_is_a_short_error(tmp_path: Path) -> None:
    (write_model_folder(tmp_path) / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ConfigError, match=r"cannot read .*recursion"):
        load_model("m", tmp_path)
