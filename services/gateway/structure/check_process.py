"""The process that checks grammars: whatever one costs, it ends by itself.

A grammar may keep llguidance busy for ever, in code that nothing can interrupt. So the kernel ends
this process when a check has taken `CPU_MAX_S` of processor time, which a busy machine does not
shorten; whoever asked sees the end of its output. It ends with its parent, too, whose end closes
its input.
"""

import json
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from services.common.grammar import parser_limits, source_of
from services.core.request import GRAMMAR_BYTES_MAX, Grammar, GrammarKind

CPU_MAX_S = 0.15
MEMORY_MAX_BYTES = 2**29
LENGTH = struct.Struct("!I")
"""Each message is JSON after its length in bytes."""

# The mark of llama.cpp's EBNF, which Lark does not know.
_EBNF_MARK = "::="
_BYTES = 256
_END = b"\xff<end of output>"


def main() -> None:
    """Read the special tokens, then grammars; answer each until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_MAX_BYTES, hard))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = _read(source)
    if first is None:
        return
    tokenizer = byte_tokenizer(
        first["vocab_size"], {int(key): name for key, name in first["special"].items()}
    )
    while (message := _read(source)) is not None:
        grammar = Grammar(GrammarKind(message["kind"]), message["text"])
        signal.setitimer(signal.ITIMER_PROF, CPU_MAX_S)
        answer = check(grammar, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(framed(answer))
        sink.flush()


def framed(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def _read(source: BinaryIO) -> dict[str, Any] | None:
    """The next message, None at the end."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    body: dict[str, Any] = json.loads(source.read(LENGTH.unpack(head)[0]))
    return body


def byte_tokenizer(vocab_size: int, special: Mapping[int, str]) -> LLTokenizer:
    """A tokenizer with the special tokens of a model, at their ids, and single bytes as others.

    A grammar that it can follow has an output with any tokenizer of these special tokens, and the
    check needs none of the model's other tokens. The token after all of them ends the output.
    """
    tokens = [b""] * max(vocab_size, _BYTES + len(special), max(special, default=0) + 1)
    free = (index for index in range(len(tokens)) if index not in special)
    ids = {byte: next(free) for byte in range(_BYTES)}
    for byte, index in ids.items():
        tokens[index] = bytes([byte])
    for index, name in special.items():
        tokens[index] = b"\xff" + name.encode()
    return LLTokenizer(TokenizerWrapper(_Bytes([*tokens, _END], ids, special)))


class _Bytes:
    """What `TokenizerWrapper` asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], ids: Mapping[int, int], special: Iterable[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [*special, self.eos_token_id]
        self._ids = ids

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text."""
        return [self._ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def check(grammar: Grammar, tokenizer: LLTokenizer) -> dict[str, Any]:
    """What is to be said about `grammar`.

    `error`: what is wrong, else null; `text`: what to use in place of its text, null for itself;
    `ignored`: what will not be enforced.
    """
    answer = _answer(grammar, tokenizer)
    if answer["error"] and grammar.kind is GrammarKind.LARK and _EBNF_MARK in grammar.text:
        return _check_ebnf(grammar.text, tokenizer)
    return answer


def _check_ebnf(text: str, tokenizer: LLTokenizer) -> dict[str, Any]:
    try:
        lark = grammar_from("ebnf", text)
    # Of whatever type its errors are, they mean that the text is no EBNF.
    except Exception as error:  # noqa: BLE001
        return {"error": str(error)}
    if len(lark.encode()) > GRAMMAR_BYTES_MAX:
        return {"error": f"it has more than {GRAMMAR_BYTES_MAX} bytes as Lark"}
    return _answer(Grammar(GrammarKind.LARK, lark), tokenizer) | {"text": lark}


def _answer(grammar: Grammar, tokenizer: LLTokenizer) -> dict[str, Any]:
    """About the grammar as it is. Only the first mask tells whether there is any output."""
    matcher = LLMatcher(tokenizer, source_of(grammar), log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    error = matcher.get_error() or None
    return {"error": error, "text": None, "ignored": matcher.get_grammar_warnings()}


if __name__ == "__main__":
    main()
