"""Token ids of a text that continues an output."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.worker.errors import ModelError
from services.worker.openai_engine.errors import UpstreamFailed
from services.worker.openai_engine.retokenizer import Retokenizer
from tests.support.tiny_models import write_tokenizer

TEXTS = ("a", " a", "\n", "\n\nab", "Größe 日本 🐍", "  x  ", "word7")


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 320)
    return tmp_path


@pytest.fixture
def marked_words(tmp_path: Path) -> Path:
    """As the tokenizers of Llama 2 and Mistral: the beginning of a text gets a space's mark."""
    pieces = ["<unk>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "x", "▁a"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=ids, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("folder", ["byte_level", "marked_words"])
@pytest.mark.parametrize("text", TEXTS)
def test_retokenizing_preserves_the_text(
    folder: str, text: str, request: pytest.FixtureRequest
) -> None:
    retokenizer = Retokenizer(request.getfixturevalue(folder))
    before = retokenizer.ids("x")
    ids = retokenizer.ids(text)
    assert retokenizer.text([*before, *ids]) == retokenizer.text(list(before)) + text


def test_special_tokens_keep_their_ids(byte_level: Path) -> None:
    end = Retokenizer(byte_level).text([2])
    assert Retokenizer(byte_level).ids(f"a{end}")[-1] == 2


def test_untokenizable_text_fails(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"\n": 0, "a": 1}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UpstreamFailed, match="no tokens"):
        Retokenizer(tmp_path).ids("b")


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Retokenizer(tmp_path)
