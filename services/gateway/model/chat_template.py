"""Renders chat templates, in a sandbox, to the text of a prompt.

Rendering may take any time and memory, so the gateway renders in a process of its own; see
render_process.py.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.clock import unix_s
from services.common.errors import ConfigError
from services.gateway.model.merged_turns import has_late_system, merged_forms
from services.gateway.vocabulary.errors import BadRequest

Messages = Sequence[Mapping[str, Any]]
_MOVED = (
    "the chat template permits system messages at the beginning only; later ones were moved there"
)
REASON_CHARS_MAX = 300
_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError),
    *(AttributeError, ArithmeticError, RecursionError),
)


class _Generation(Extension):
    """Ignores the tags `generation` and `endgeneration`, which mark text to train on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template, and the special tokens that are variables of the template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], hidden: str | None = None
    ) -> None:
        """`hidden`: a text in messages that errors must not contain.

        Raises:
            ConfigError: if the template does not compile.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        # Besides jinja2's errors, Python's compiler has its own.
        except Exception as error:
            raise ConfigError(
                f"the model's chat template does not compile: {error}; correct the template"
            ) from error
        self._special_tokens = dict(special_tokens)
        # The mark consists of digits, which no template removes or changes.
        self._mark = f"{secrets.randbits(64):020}"
        self._hidden = [text for text in (hidden, self._mark) if text]

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        warn: Callable[[str], object] | None = None,
    ) -> str:
        """Render the prompt of the assistant's next message, or of the rest of the last message.

        `variables`: further template variables, whose names must be names that clients may set.
        If the template refuses the messages, they are merged as far as it needs; see
        `merged_forms`. `warn` is called with an ASCII text if that moves a message.

        Raises:
            BadRequest: if the template refuses the messages in every form.
        """
        # As in transformers, pass absent values as none, not as undefined.
        context = {
            **(variables or {}),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        render = self._unfinished if continue_final_message else self._rendered
        try:
            return render(messages, context)
        except _TEMPLATE_ERRORS as refused:
            error = refused
            for form in merged_forms(messages):
                try:
                    text = render(form, context)
                except _TEMPLATE_ERRORS as refused_form:
                    # The remaining fault is one that merging does not mend.
                    error = refused_form
                    continue
                if warn is not None and has_late_system(messages) and not has_late_system(form):
                    warn(_MOVED)
                return text
            raise BadRequest(
                f"the model's chat template refuses these messages: {self._reason(error)}",
                param="messages",
            ) from error

    def _reason(self, error: Exception) -> str:
        """The text of an error, which may quote messages."""
        reason = str(error)
        for text in self._hidden:
            reason = reason.replace(text, "")
        return reason if len(reason) <= REASON_CHARS_MAX else f"{reason[:REASON_CHARS_MAX]}…"

    def _rendered(self, messages: Messages, context: Mapping[str, Any]) -> str:
        return self._template.render(
            {**context, "messages": [dict(message) for message in messages]}
        )

    def _unfinished(self, messages: Messages, context: Mapping[str, Any]) -> str:
        """Render the prompt up to the end of the last message's content.

        Raises:
            BadRequest: if the prompt does not contain the content.
        """
        *earlier, last = messages
        content = last["content"]
        visible = content.rstrip()
        # The content may occur anywhere in the prompt, and several times, so mark its end.
        marked = [*earlier, {**last, "content": visible + self._mark}]
        head, mark, tail = self._rendered(marked, context).rpartition(self._mark)
        if not mark:
            raise BadRequest(
                "the last message cannot be continued, because the template omits it; send"
                " 'continue_final_message': false",
                param="continue_final_message",
            )
        head = head.replace(mark, "")
        if content == visible:
            return head
        # The template may trim whitespace at the end: keep what it keeps.
        whole = self._rendered(messages, context)
        kept = len(whole) - len(head) - len(tail)
        if kept > 0 and whole.startswith(head) and whole.endswith(tail):
            return whole[: len(head) + kept]
        return head


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML, which does not occur in the training data of models.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.fromtimestamp(unix_s()).strftime(layout)
