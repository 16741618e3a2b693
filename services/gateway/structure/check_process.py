"""The process that checks grammars: whatever one costs, its check ends by itself.

A grammar may keep llguidance busy for ever, in code that nothing can interrupt. So each check runs
in a fork of this process, which the kernel ends when the check has taken `CPU_MAX_S` of processor
time, which a busy machine does not shorten, or has not had that in `WALL_MAX_S`. A fork has all
that it needs loaded, so a bomb costs its check and nothing more. Several run at once; their answers
come as they end. One that nobody waits for any more is cancelled, and ends at once. This process
ends with its parent, whose end closes its input.
"""

import contextlib
import json
import os
import resource
import selectors
import signal
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from services.common.grammar import parser_limits, source_of
from services.core.request import GRAMMAR_BYTES_MAX, Grammar, GrammarKind

CPU_MAX_S = 0.15
WALL_MAX_S = 10.0
MEMORY_MAX_BYTES = 2**26
"""What one check may take beside what is there for all of them; ordinary grammars take 10 MiB."""
PIPE_BYTES = 65536
NICENESS = 5
"""Tokens for others are more urgent than the check of a grammar."""
LENGTH = struct.Struct("!I")
"""Each message is JSON after its length in bytes."""

# The mark of llama.cpp's EBNF, which Lark does not know.
_EBNF_MARK = "::="
_BYTES = 256
_END = b"\xff<end of output>"


@dataclass(slots=True)
class _Check:
    """One that a fork makes: the number that it was sent with, and what the fork has told."""

    number: int
    pid: int
    told: bytearray = field(default_factory=bytearray)


def main() -> None:
    """Read the special tokens, then numbered grammars, and numbers of those to be cancelled.

    Each grammar has one answer, cancelled ones too, until the input ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # No buffer: what has been read ahead is not seen by a selector.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as source:
        first = _read(source)
        if first is None:
            return
        tokenizer = byte_tokenizer(
            first["vocab_size"], {int(key): name for key, name in first["special"].items()}
        )
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY_MAX_BYTES, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # to write one takes long
        os.nice(NICENESS)
        _serve(source, sys.stdout.buffer, tokenizer)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process; see proc(5)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    return pages * resource.getpagesize()


def _serve(source: RawIOBase, sink: BinaryIO, tokenizer: LLTokenizer) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    _listen(key.fd, key.data, selector, sink)
                elif (message := _read(source)) is None:
                    return
                elif (number := message.get("cancel")) is not None:
                    _end(number, selector)
                else:
                    output, one = _begin(message, tokenizer)
                    selector.register(output, selectors.EVENT_READ, one)


def _begin(message: Mapping[str, Any], tokenizer: LLTokenizer) -> tuple[int, _Check]:
    """Where the fork that checks will tell its answer; the fork does not return."""
    grammar = Grammar(GrammarKind(message["kind"]), message["text"])
    output, entry = os.pipe()
    pid = os.fork()
    if pid:
        os.close(entry)
        return output, _Check(message["number"], pid)
    code = 1
    # Whatever goes wrong, a fork is never to go on as the process that it was made of.
    with contextlib.suppress(BaseException):
        signal.setitimer(signal.ITIMER_REAL, WALL_MAX_S)
        signal.setitimer(signal.ITIMER_PROF, CPU_MAX_S)
        answer = json.dumps(check(grammar, tokenizer)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        with open(entry, "wb") as file:
            file.write(answer)
        code = 0
    os._exit(code)


def _end(number: int, selector: selectors.BaseSelector) -> None:
    """End the check of this number, unless it is over."""
    for key in selector.get_map().values():
        if key.data is not None and key.data.number == number:
            # No one waits for a fork before its output has ended, so its id is its own.
            os.kill(key.data.pid, signal.SIGKILL)


def _listen(output: int, one: _Check, selector: selectors.BaseSelector, sink: BinaryIO) -> None:
    """Take what a fork tells; pass it on once that is all, or how the fork ended without it."""
    if told := os.read(output, PIPE_BYTES):
        one.told += told
        return
    selector.unregister(output)
    os.close(output)
    _, status = os.waitpid(one.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    answer: dict[str, Any] = {"ended": code} if code else json.loads(one.told)
    sink.write(framed({"number": one.number, **answer}))
    sink.flush()


def framed(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def _read(source: RawIOBase) -> dict[str, Any] | None:
    """The next message, None at the end."""
    head = _read_exactly(source, LENGTH.size)
    body = head and _read_exactly(source, LENGTH.unpack(head)[0])
    if not body:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def _read_exactly(source: RawIOBase, count: int) -> bytes:
    """So many bytes; none if the input ends before."""
    found = bytearray()
    while len(found) < count:
        part = source.read(count - len(found))
        if not part:
            return b""
        found += part
    return bytes(found)


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
    # An error of any type means that the text is no EBNF.
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
