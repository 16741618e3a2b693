"""Tries the tokenizer and the chat template of a model folder in a process that may be ended.

A hostile or broken file may loop, take all memory or end its process in code that cannot be
interrupted, so the gateway opens the files itself only after the trial.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.common.child import plain_environment
from services.common.errors import ConfigError
from services.common.messages import limit_memory, limit_soft
from services.gateway.model.chat_template import ChatTemplate
from services.gateway.model.template import load_template
from services.gateway.text.tokenizer import read_tokenizer
from services.gateway.vocabulary.errors import BadRequest

CPU_MAX_S = 5
"""Processor time of a trial without a large tokenizer; the machine's load does not matter."""
BYTES_PER_CPU_S = 10_000_000
"""Bytes of tokenizer.json that extend the processor time by a second, because a large vocabulary
takes long to load."""
WALL_MAX_S = 60.0
MEMORY_MAX_BYTES = 2**31
TOKEN_CHARS_MAX = 2**13
GROWTH_MAX = 16
"""Maximum tokens per byte of text; the compatibility normalization of Unicode reaches 11."""
RUN_CHARS = 1024
"""Length of the texts that repeat a character, on which expressions that backtrack take long."""
_ENDED = {
    -signal.SIGXCPU: "takes too long",
    -signal.SIGABRT: "takes too much memory, or crashes",
}
_CHAT = [{"role": "user", "content": "hi"}]


def try_model(model_dir: Path) -> frozenset[str]:
    """Try the files; return the variables that the chat template reads, none without a template.

    Raises:
        ConfigError: if a file is unusable.
    """
    command = (sys.executable, "-m", __name__, str(model_dir))
    try:
        done = subprocess.run(
            command,
            env=plain_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WALL_MAX_S,
            check=False,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = -signal.SIGXCPU, error.stdout or b""
    except OSError as error:
        raise ConfigError(
            f"cannot start a process ({error.strerror}); raise the limit of processes"
        ) from error
    lines = output.decode(errors="replace").splitlines()
    if code:
        part = lines[-1] if lines else "tokenizer.json"
        reason = _ENDED.get(code, f"ends its process with code {code}")
        raise ConfigError(f"{part} of {model_dir} {reason}; use another model or correct the file")
    result: dict[str, Any] = json.loads(lines[-1])
    if "error" in result:
        raise ConfigError(result["error"])
    return frozenset(result["variables"])


def cpu_max_s(model_dir: Path) -> int:
    """Seconds of processor time for the trial of a folder, which grow with its tokenizer."""
    try:
        size_bytes = (model_dir / "tokenizer.json").stat().st_size
    except OSError:
        size_bytes = 0
    return CPU_MAX_S + size_bytes // BYTES_PER_CPU_S


def main() -> None:
    """Try the files of the folder in the arguments; write each part, and then the result."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    model_dir = Path(sys.argv[1])
    limit_soft(resource.RLIMIT_CPU, cpu_max_s(model_dir))
    limit_memory(MEMORY_MAX_BYTES)
    try:
        print("tokenizer.json", flush=True)
        _try_tokenizer(model_dir)
        print("the chat template", flush=True)
        result: dict[str, Any] = {"variables": sorted(_try_template(model_dir))}
    except ConfigError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)


def _try_template(model_dir: Path) -> frozenset[str]:
    """Compile and render the chat template; return its variables."""
    loaded = load_template(model_dir)
    if loaded is None:
        return frozenset()
    template = ChatTemplate(loaded.source, loaded.special_tokens)
    try:
        template.render(_CHAT)
    except BadRequest:
        # The template may need other messages.
        pass
    except MemoryError:
        raise ConfigError(
            f"the chat template of {model_dir} takes too much memory; correct the template"
        ) from None
    return template.variables


def _try_tokenizer(model_dir: Path) -> None:
    path, text = read_tokenizer(model_dir)
    try:
        _try_texts(Tokenizer.from_str(text), json.loads(text))
    # The package raises plain Exception for a malformed file, and a panic is a BaseException.
    except BaseException as error:
        raise ConfigError(
            f"{path} is not a usable tokenizer: {error}; fetch or convert the model again"
        ) from error


def _try_texts(tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    """Encode and decode texts on which a harmful tokenizer takes long. Raises ConfigError."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    token_chars = [len(tokenizer.id_to_token(number) or "") for number in ids]
    if max(token_chars, default=0) > TOKEN_CHARS_MAX:
        raise ConfigError(f"a token has more than {TOKEN_CHARS_MAX} characters")
    for text in _texts(settings):
        if len(tokenizer.encode(text).ids) > GROWTH_MAX * (len(text.encode()) + 1):
            raise ConfigError("a text becomes too many tokens")
    decoded = tokenizer.decode(list(ids), skip_special_tokens=False)
    if len(decoded) > GROWTH_MAX * (sum(token_chars) + 1):
        raise ConfigError("the text of the tokens is too long")


def _texts(settings: dict[str, Any]) -> Iterator[str]:
    """Texts of what the normalizer and the pre-tokenizer search, and runs of its characters."""
    patterns = set(_strings([settings.get("normalizer"), settings.get("pre_tokenizer")]))
    yield from ("", "The tide comes in. Ça va — 日本語!", *patterns)
    for character in sorted({*map(chr, range(32, 127)), "\n", *"".join(patterns)}):
        yield character * RUN_CHARS + "\0"


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


if __name__ == "__main__":
    main()
