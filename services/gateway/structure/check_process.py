"""Checks grammars in a separate process, each within limits of time and memory.

A grammar may keep llguidance busy for ever in code that cannot be interrupted. So each check runs
in a fork of this process. The kernel ends the fork after `CPU_MAX_S` of processor time per grammar
or `TOTAL_CPU_MAX_S` in all, which do not depend on the load of the machine, or after `WALL_MAX_S`.
A fork shares the loaded libraries, so
a check costs no start-up, and a malicious grammar affects only its own check. Checks run
concurrently, and each result is sent when its check ends; a cancelled check is killed at once. This
process ends with its parent, which closes its standard input.
"""

import contextlib
import json
import os
import resource
import selectors
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import RawIOBase
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from services.common.grammar import parser_limits, source_of
from services.common.messages import encode_message, limit_memory, limit_soft, read_message
from services.core.request import GRAMMAR_BYTES_MAX, Grammar, GrammarKind
from services.gateway.structure.references import reference_fault
from services.gateway.structure.schema import OPTIONS, compact_json
from services.gateway.structure.unenforced import (
    COUNT_COMPLAINTS,
    COUNTS,
    SILENT,
    located,
    regex_reason,
    remove_unenforced,
)

CPU_MAX_S = 0.15
"""Processor time of the check of a grammar."""
TOTAL_CPU_MAX_S = 1
"""Processor time of a check of several grammars; the kernel counts whole seconds."""
WALL_MAX_S = 10.0
MEMORY_MAX_BYTES = 2**26
"""Memory that a check may allocate beyond what the fork shares; ordinary grammars take 10 MiB."""
PIPE_BYTES = 65536
NICENESS = 5
"""Checks yield the processor to requests that generate tokens."""

# Part of llama.cpp's EBNF, but not of Lark's syntax.
_EBNF_MARK = "::="
_BYTES = 256
_END = b"\xff<end of output>"


@dataclass(slots=True)
class _Check:
    """A check in a fork: its number, the fork's process id, and the fork's output so far.

    The output has a line per grammar: its result.
    """

    number: int
    pid: int
    output: bytearray = field(default_factory=bytearray)


def main() -> None:
    """Read the vocabulary, then numbered checks and cancellations, until the input ends.

    A check has one or more grammars. Sends one message per check, even if it is cancelled: the
    results of its grammars, and the fork's exit code if the fork ended within the next grammar.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Unbuffered: the selector would not report messages that a buffer has read ahead.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as source:
        first = read_message(source)
        if first is None:
            return
        tokenizer = byte_tokenizer(
            first["vocab_size"], {int(key): name for key, name in first["special"].items()}
        )
        limit_memory(MEMORY_MAX_BYTES)
        # A fork that is killed must not spend time on a core dump.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(NICENESS)
        _serve(source, sys.stdout.buffer, tokenizer)


def _serve(source: RawIOBase, sink: BinaryIO, tokenizer: LLTokenizer) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    _read_output(key.fd, key.data, selector, sink)
                elif (message := read_message(source)) is None:
                    return
                elif (number := message.get("cancel")) is not None:
                    _cancel(number, selector)
                else:
                    output, started = _start(message, tokenizer)
                    selector.register(output, selectors.EVENT_READ, started)


def _start(message: Mapping[str, Any], tokenizer: LLTokenizer) -> tuple[int, _Check]:
    """Fork for a check; return the pipe from which to read its result. The fork exits here."""
    grammars = [Grammar(GrammarKind(kind), text) for kind, text in message["grammars"]]
    output, entry = os.pipe()
    pid = os.fork()
    if pid:
        os.close(entry)
        return output, _Check(message["number"], pid)
    code = 1
    # The fork must exit after any exception, and never return into the caller's loop.
    with contextlib.suppress(BaseException):
        signal.setitimer(signal.ITIMER_REAL, WALL_MAX_S)
        limit_soft(resource.RLIMIT_CPU, TOTAL_CPU_MAX_S)
        with open(entry, "wb", buffering=0) as file:
            for grammar in grammars:
                signal.setitimer(signal.ITIMER_PROF, CPU_MAX_S)
                result = check(grammar, tokenizer)
                # The limit applies to the check, not to the write of its result.
                signal.setitimer(signal.ITIMER_PROF, 0)
                file.write(json.dumps(result).encode() + b"\n")
        code = 0
    os._exit(code)


def _cancel(number: int, selector: selectors.BaseSelector) -> None:
    """Kill the check with this number, unless it has ended."""
    for key in selector.get_map().values():
        if key.data is not None and key.data.number == number:
            # The fork is reaped only after its pipe is closed, so its process id is not reused.
            os.kill(key.data.pid, signal.SIGKILL)


def _read_output(
    output: int, running: _Check, selector: selectors.BaseSelector, sink: BinaryIO
) -> None:
    """Read a fork's output; at its end, send the results and the fork's exit code to `sink`."""
    if part := os.read(output, PIPE_BYTES):
        running.output += part
        return
    selector.unregister(output)
    os.close(output)
    _, status = os.waitpid(running.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    # A fork that is ended may leave a part of a line.
    *lines, _ = running.output.split(b"\n")
    message: dict[str, Any] = {"number": running.number, "results": list(map(json.loads, lines))}
    sink.write(encode_message(message | {"ended": code} if code else message))
    sink.flush()


def byte_tokenizer(vocab_size: int, special: Mapping[int, str]) -> LLTokenizer:
    """Make a tokenizer of the model's special tokens, at their ids, and of the 256 single bytes.

    A grammar that has an output with this tokenizer has an output with any tokenizer with the same
    special tokens, so the check needs none of the model's other tokens. The last token, after the
    vocabulary, ends the output.
    """
    tokens = [b""] * max(vocab_size, _BYTES + len(special), max(special, default=0) + 1)
    free = (index for index in range(len(tokens)) if index not in special)
    ids = {byte: next(free) for byte in range(_BYTES)}
    for byte, index in ids.items():
        tokens[index] = bytes([byte])
    for index, name in special.items():
        tokens[index] = b"\xff" + name.encode()
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer([*tokens, _END], ids, special)))


class _ByteTokenizer:
    """The interface that `TokenizerWrapper` needs of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], ids: Mapping[int, int], special: Iterable[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [*special, self.eos_token_id]
        self._ids = ids

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the token ids of a text."""
        return [self._ids[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def check(grammar: Grammar, tokenizer: LLTokenizer) -> dict[str, Any]:
    """Check a grammar and return the fields of the result.

    `error`: why the grammar cannot be used, or None; `text`: the text to use instead of the
    grammar's own, or None; `ignored`: warnings about what will not be enforced.
    """
    result = _check_as_is(grammar, tokenizer)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return _check_places(grammar.text, result, tokenizer)
    if result["error"] and grammar.kind is GrammarKind.LARK and _EBNF_MARK in grammar.text:
        return _check_ebnf(grammar.text, tokenizer)
    return result


def _check_places(text: str, result: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, Any]:
    """Complete the result of a JSON schema, so that messages name places in the schema."""
    if '"$ref"' in text and (fault := reference_fault(json.loads(text))) is not None:
        return result | {"error": fault}
    silent = any(f'"{keyword}"' in text for keyword in SILENT)
    if result["error"] or result["ignored"] or silent:
        return _check_reduced(json.loads(text), tokenizer)
    return result


def _check_reduced(schema: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, Any]:
    """Check a JSON schema without the parts that cannot be enforced.

    These are an error if the schema is strict, that is, if its options lack `lenient`.
    """
    options = schema.pop(OPTIONS)
    removed = remove_unenforced(schema)
    result = _check_schema(schema, options, tokenizer)
    messages = " ".join([result["error"] or "", *result["ignored"]])
    if any(complaint in messages for complaint in COUNT_COMPLAINTS):
        again = remove_unenforced(schema, everywhere=COUNTS)
        removed += [report for report in again if report not in removed]
        result = _check_schema(schema, options, tokenizer)
    if removed and not options.get("lenient"):
        return result | {"error": "; ".join(removed)}
    if result["error"]:
        return result | {"error": located(schema, result["error"])}
    # The reports include overlaps of `oneOf`, with their places.
    rest = [text for text in result["ignored"] if not text.startswith("oneOf")]
    return result | {"ignored": [*removed, *rest]}


def _check_schema(
    schema: Mapping[str, Any], options: Mapping[str, Any], tokenizer: LLTokenizer
) -> dict[str, Any]:
    text = compact_json({**schema, OPTIONS: options})
    return _check_as_is(Grammar(GrammarKind.JSON_SCHEMA, text), tokenizer) | {"text": text}


def _check_ebnf(text: str, tokenizer: LLTokenizer) -> dict[str, Any]:
    try:
        lark = grammar_from("ebnf", text)
    # The converter raises errors of many types for a text that is no EBNF.
    except Exception as error:  # noqa: BLE001
        return {"error": str(error)}
    if len(lark.encode()) > GRAMMAR_BYTES_MAX:
        return {"error": f"it has more than {GRAMMAR_BYTES_MAX} bytes as Lark"}
    return _check_as_is(Grammar(GrammarKind.LARK, lark), tokenizer) | {"text": lark}


def _check_as_is(grammar: Grammar, tokenizer: LLTokenizer) -> dict[str, Any]:
    """Check the grammar as it is, without conversion."""
    matcher = LLMatcher(tokenizer, source_of(grammar), log_level=0, limits=parser_limits())
    # A grammar without any output is an error only once the first mask is computed.
    if not matcher.is_error():
        matcher.compute_bitmask()
    error = regex_reason(matcher.get_error()) or None
    return {"error": error, "text": None, "ignored": matcher.get_grammar_warnings()}


if __name__ == "__main__":
    main()
