"""Renders chat templates, in a sandbox, to the text of a prompt."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.common.clock import unix_s
from services.common.errors import ConfigError
from services.gateway.vocabulary.errors import BadRequest


class ChatTemplate:
    """A compiled chat template, and the special tokens that are variables of the template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self._names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the model's chat template does not compile: {error}; correct the template"
            ) from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    def takes(self, name: str) -> bool:
        """Return whether the template reads the variable `name`."""
        return name in self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render the prompt of the assistant's next message, or of the rest of the last message.

        `variables`: further template variables, whose names must be names that clients may set.

        Raises:
            BadRequest: if the template refuses the messages.
        """
        # As in transformers, pass absent values as none, not as undefined.
        own_variables = {
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._rendered(messages, {**(variables or {}), **own_variables})
        return _unfinished(text, messages[-1]["content"]) if continue_final_message else text

    def _rendered(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(
                {
                    **variables,
                    **self._special_tokens,
                    "messages": [dict(message) for message in messages],
                }
            )
        except (
            *(jinja2.TemplateError, TypeError, ValueError, LookupError),
            *(AttributeError, ArithmeticError, RecursionError),
        ) as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _unfinished(text: str, last: str) -> str:
    """Cut the prompt at the end of the last message, before what the template appends to it."""
    # Templates may strip messages.
    for content in (last, last.rstrip(), last.strip()):
        start = text.rfind(content)
        if content and start >= 0:
            return text[: start + len(content)]
    raise BadRequest(
        "the last message cannot be continued, because it is empty or changed by the template; send"
        " 'continue_final_message': false",
        param="continue_final_message",
    )


def load_template(model_dir: Path) -> ChatTemplate | None:
    """Read the chat template of a model folder; None if the model has none.

    Raises:
        ConfigError: if a file cannot be read or the template does not compile.
    """
    settings = read_json(model_dir / "tokenizer_config.json")
    source: Any = settings.get("chat_template")
    # The file is the newer convention and takes precedence over tokenizer_config.json.
    path = model_dir / "chat_template.jinja"
    if path.exists():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    if isinstance(source, list):
        # A list has several named templates; "default" is for chats without tools.
        named = {item.get("name"): item.get("template") for item in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _special_tokens(settings))


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty if the file does not exist.

    Raises:
        ConfigError: if the file cannot be read or holds no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}; fetch the model again") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object; fetch the model again")
    return data


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML, which does not occur in the training data of models.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.fromtimestamp(unix_s()).strftime(layout)
