"""The default model as converted by the set-up, which `make test` runs first."""

import json
from pathlib import Path
from typing import Any

import pytest

from tideserve.cli.cache import cache_root
from tideserve.cli.model_folder import damaged_files
from tideserve.cli.model_store import prepare_default_model


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_default_model(cache_root(), print)


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return loaded


def test_files_match_their_checksums(folder: Path) -> None:
    assert damaged_files(folder, thorough=True) == []


def test_the_config_matches_the_model(config: dict[str, Any]) -> None:
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert config["max_position_embeddings"] == 8192
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_generation_ends_at_the_end_of_a_turn(folder: Path) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


def test_the_tied_embedding_is_stored_once(folder: Path, config: dict[str, Any]) -> None:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert "lm_head.weight" not in names
        shape = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert shape == [config["vocab_size"], config["hidden_size"]]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("a  7", ["a", "ĠĠ", "7"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_the_tokenizer_matches_the_models_training(
    folder: Path, text: str, tokens: list[str]
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text).tokens == tokens


def test_the_model_knows_the_capital_of_france(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert int(answer[-1]) == model.generation_config.eos_token_id
