"""`tideserve chat`: sends a prompt, or a conversation, to the served model."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tideserve.cli.client import STREAM_TIMEOUT_S, HttpClient
from tideserve.cli.errors import CommandError

PROMPT_MARK = "> "


@dataclass
class Conversation:
    """The messages so far, and the settings of the next request."""

    client: HttpClient
    model: str
    temperature: float | None = None
    max_tokens: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, prompt: str) -> Iterator[str]:
        """Yield the pieces of the answer; a complete answer is appended to the conversation.

        An interrupted answer is dropped with its question. Raises CommandError.
        """
        question = {"role": "user", "content": prompt}
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*self.messages, question],
            "stream": True,
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_tokens is not None:
            body["max_completion_tokens"] = self.max_tokens
        pieces = []
        events = self.client.post_events("/v1/chat/completions", body)
        with contextlib.closing(events):
            for event in events:
                piece = _content(event)
                if piece:
                    pieces.append(piece)
                    yield piece
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]


def chat(
    url: str,
    api_key: str | None,
    prompt: str | None,
    model: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
) -> None:
    """Answer `prompt`, else a pipe as one message, else a terminal's lines. Raises CommandError."""
    with HttpClient(url, api_key, STREAM_TIMEOUT_S) as client:
        conversation = Conversation(client, "", temperature, max_tokens)
        if system:
            conversation.messages.append({"role": "system", "content": system})
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read()
            if not prompt.strip():
                raise CommandError("the prompt on standard input is empty; pipe some text in")
        conversation.model = model or first_model(client)
        if prompt is None:
            _converse(conversation)
        else:
            _print_answer(conversation, prompt)


def first_model(client: HttpClient) -> str:
    """Name of the model that the gateway serves. Raises CommandError."""
    listing = client.get_json("/v1/models")
    try:
        return str(listing["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise CommandError(
            f"{client.url} serves no model yet; see `tideserve status`, or pass a name with --model"
        ) from error


def _converse(conversation: Conversation) -> None:
    print(f"{conversation.model} at {conversation.client.url}")
    print("Ctrl-C stops an answer, Ctrl-D exits.")
    with contextlib.suppress(ImportError):
        # Line editing and history, if Python was built with readline.
        import readline  # noqa: F401
    while True:
        try:
            prompt = input(PROMPT_MARK)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if not prompt.strip():
            continue
        try:
            _print_answer(conversation, prompt)
        except KeyboardInterrupt:
            print("(stopped)")
        except CommandError as error:
            print(error, file=sys.stderr)


def _print_answer(conversation: Conversation, prompt: str) -> None:
    try:
        for piece in conversation.ask(prompt):
            print(piece, end="", flush=True)
    finally:
        print()


def _content(event: dict[str, Any]) -> str:
    """Text of a chat completion chunk; the usage chunk has no choices."""
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")
