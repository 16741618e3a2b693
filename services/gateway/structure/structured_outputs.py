"""Parses the request fields for structured output, those of OpenAI's API and of vLLM."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.core.request import Grammar, GrammarKind
from services.gateway.structure.schema import ANY_OBJECT, check_size, schema_text
from services.gateway.vocabulary.errors import BadRequest, NotSupported

CHOICES_MAX = 1000
"""Maximum texts in a list of choices."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A grammar that a client requests, not checked yet, and the field `param` that requests it.

    `subject`: the part of the field, for errors and warnings, if the field has several grammars.
    """

    grammar: Grammar
    param: str
    subject: str = ""


def response_format_structure(value: Any) -> Structure | None:
    """Parse `response_format`; None for plain text.

    With `strict`, a keyword of the schema that cannot be enforced is an error; without, the keyword
    is ignored.

    Raises:
        BadRequest: if the field is malformed or its type is unknown.
    """
    param = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return _schema(ANY_OBJECT, param)
        case "json_schema":
            return _json_schema(value.get("json_schema"), param)
        case "structural_tag":
            raise NotSupported("'structural_tag' is not supported yet; use 'tools'", param=param)
    raise BadRequest(
        f"'{param}' must be an object whose type is 'text', 'json_object' or 'json_schema'",
        param=param,
    )


def structured_outputs_structure(value: Any) -> Structure | None:
    """Parse vLLM's `structured_outputs`, which must name exactly one form; None for null.

    Raises:
        BadRequest: if the field names no form, several forms or an unknown form.
    """
    param = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BadRequest(f"'{param}' must be an object; see the documentation", param=param)
    # Clients may send the forms that they do not use as null or false.
    named = {key: item for key, item in value.items() if item is not None and item is not False}
    if len(named) != 1 or not named.keys() <= _FORMS.keys():
        forms = ", ".join(f"'{form}'" for form in _FORMS)
        raise BadRequest(f"'{param}' must name exactly one of {forms}", param=param)
    form, item = named.popitem()
    return _FORMS[form](item, f"{param}.{form}")


def guided_structure(form: str, value: Any) -> Structure | None:
    """Parse vLLM's older field `guided_<form>`; None for null. Raises BadRequest."""
    return None if value is None else _FORMS[form](value, f"guided_{form}")


def _json_schema(value: Any, param: str) -> Structure:
    if not isinstance(value, Mapping) or not isinstance(value.get("name", ""), str):
        raise BadRequest(
            f"'{param}.json_schema' must be an object with a 'name' and a 'schema'", param=param
        )
    strict, schema = value.get("strict"), value.get("schema")
    if strict is not None and not isinstance(strict, bool):
        raise BadRequest(f"'{param}.json_schema.strict' must be true or false", param=param)
    if schema is None:
        return _schema(ANY_OBJECT, param)
    if not isinstance(schema, Mapping):
        raise BadRequest(f"'{param}.json_schema.schema' must be an object", param=param)
    return _schema(schema, param, lenient=not strict)


def _schema(schema: Mapping[str, Any], param: str, lenient: bool = False) -> Structure:
    text = schema_text(schema, param, lenient)
    return Structure(Grammar(GrammarKind.JSON_SCHEMA, text), param)


def _json_form(value: Any, param: str) -> Structure:
    """Parse a JSON schema: an object, or JSON text."""
    schema = value
    if isinstance(value, str):
        check_size(value, param)
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            schema = None
    if not isinstance(schema, Mapping):
        raise BadRequest(f"'{param}' must be a JSON schema: an object", param=param)
    return _schema(schema, param)


def _object_form(value: Any, param: str) -> Structure:
    if value is not True:
        raise BadRequest(f"'{param}' must be true or false", param=param)
    return _schema(ANY_OBJECT, param)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"'{param}' must be a nonempty string", param=param)
    check_size(value, param)
    return value


def _regex_form(value: Any, param: str) -> Structure:
    return Structure(Grammar(GrammarKind.REGEX, _text(value, param)), param)


def _grammar_form(value: Any, param: str) -> Structure:
    """Parse a grammar: Lark, or llama.cpp's EBNF, which the check translates to Lark."""
    return Structure(Grammar(GrammarKind.LARK, _text(value, param)), param)


def _choice_form(value: Any, param: str) -> Structure:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadRequest(f"'{param}' must be a nonempty list of strings", param=param)
    if len(value) > CHOICES_MAX:
        raise BadRequest(
            f"'{param}' has {len(value)} texts, but at most {CHOICES_MAX} are allowed; use fewer",
            param=param,
        )
    texts = [lark_literal(_text(item, param)) for item in value]
    text = "start: " + " | ".join(texts)
    check_size(text, param)
    return Structure(Grammar(GrammarKind.LARK, text), param)


def lark_literal(text: str) -> str:
    """Spell `text` as a Lark literal, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


_FORMS: dict[str, Callable[[Any, str], Structure]] = {
    "json": _json_form,
    "regex": _regex_form,
    "choice": _choice_form,
    "grammar": _grammar_form,
    "json_object": _object_form,
}
