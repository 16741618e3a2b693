"""Chat templates: messages to prompt text, in a sandbox."""

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
    """A compiled chat template and the special tokens that it may name."""

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
        """Whether the template looks at a variable of that name."""
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
        """The prompt text that asks for the assistant's next message, or the rest of the last one.

        `variables`: what else the template is told; the names must be those that clients may set.

        Raises:
            BadRequest: if the template refuses these messages.
        """
        # As in transformers: an absent value is none, not undefined.
        told = {
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._rendered(messages, {**(variables or {}), **told})
        return _unfinished(text, messages[-1]["content"]) if continue_final_message else text

    def _rendered(self, messages: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> str:
        try:
            return self._template.render(
                {**told, **self._special_tokens, "messages": [dict(one) for one in messages]}
            )
        except (
            *(jinja2.TemplateError, TypeError, ValueError, LookupError),
            *(AttributeError, ArithmeticError, RecursionError),
        ) as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _unfinished(text: str, last: str) -> str:
    """`text` up to the end of the last message, without what the template has put behind it."""
    # Templates may strip messages.
    for said in (last, last.rstrip(), last.strip()):
        at = text.rfind(said)
        if said and at >= 0:
            return text[: at + len(said)]
    raise BadRequest(
        "the last message is empty, or the template changes it, so it cannot be continued; send"
        " 'continue_final_message': false",
        param="continue_final_message",
    )


def load_template(model_dir: Path) -> ChatTemplate | None:
    """The chat template of a model folder, or None if the model has none.

    Raises:
        ConfigError: if a file is there but cannot be used.
    """
    settings = read_json(model_dir / "tokenizer_config.json")
    source: Any = settings.get("chat_template")
    path = model_dir / "chat_template.jinja"
    if path.exists():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    if isinstance(source, list):
        # Several named templates: the one for plain chat is called "default".
        named = {item.get("name"): item.get("template") for item in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _special_tokens(settings))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if the file is not there.

    Raises:
        ConfigError: if the file is there but holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
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
    # jinja2's own filter escapes HTML, which models never saw.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.fromtimestamp(unix_s()).strftime(layout)
