"""Model folders without weights: byte-level tokenizers whose ids tests can compute.

For tests of the gateway, which must pass without torch.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<unk>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CONTEXT_TOKENS = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


OTHER_SPECIAL_TOKENS = (*SPECIAL_TOKENS, "<|turn|>")
OTHER_VOCAB_SIZE = 320
OTHER_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


def byte_tokenizer(*, other: bool = False) -> Tokenizer:
    """A tokenizer with a token per byte; with `other`, ids differ."""
    special = OTHER_SPECIAL_TOKENS if other else SPECIAL_TOKENS
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=other)]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write_model_folder(model_dir: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the files that a gateway reads of a model; returns `model_dir`."""
    model_dir.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(model_dir / "tokenizer.json"))
    config = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": EOS_ID,
    }
    (model_dir / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": {"content": SPECIAL_TOKENS[EOS_ID]}}
    if template is not None:
        settings["chat_template"] = template  # type: ignore[assignment]
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    return model_dir


def write_other_model_folder(model_dir: Path) -> Path:
    """A model with another tokenizer, template and vocabulary size; returns `model_dir`."""
    write_model_folder(model_dir, template=OTHER_TEMPLATE)
    byte_tokenizer(other=True).save(str(model_dir / "tokenizer.json"))
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": OTHER_VOCAB_SIZE}))
    return model_dir
