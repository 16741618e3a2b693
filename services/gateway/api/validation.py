"""Validates bodies against Pydantic models and turns the first error into a sentence."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from services.gateway.api.parameters import escaped_name
from services.gateway.vocabulary.errors import BadRequest

M = TypeVar("M", bound=BaseModel)
FIELDS_LISTED_MAX = 12
"""Maximum known fields that an error about an unknown field lists; beyond it, it lists none."""


class Strict(BaseModel):
    """A model without type conversions; unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def validated(kind: type[M], fields: Mapping[str, Any]) -> M:
    """Validate `fields` as a `kind`. Raises BadRequest about the first invalid field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        # Report only the first error, and never quote the input.
        first = error.errors(include_url=False, include_input=False)[0]
        where = escaped_name(".".join(str(part)[:64] for part in first["loc"])) or None
        predicate = _predicate(first, where, _fields(kind, first["loc"][:-1]))
        raise BadRequest(f"'{where}'{predicate}", param=where) from None


def _predicate(error: ErrorDetails, where: str | None, known: Sequence[str]) -> str:
    """The predicate of the error sentence; `known`: the fields of the same object."""
    if error["type"] == "extra_forbidden" and known:
        return f" is not a field; the fields are {', '.join(known)}"
    return _remedy(error, where) or f": {error['msg'][0].lower()}{error['msg'][1:]}"


def _remedy(error: ErrorDetails, where: str | None) -> str | None:
    """A predicate with a remedy for frequent errors; None: use pydantic's message."""
    match error["type"]:
        case "model_type":
            return " is not an object; send a JSON object"
        case "missing" if where == "model":
            return " is missing; send the name of a model that /v1/models lists"
        case "missing":
            return " is missing; send it"
        case "too_short":
            return f" is too short; send at least {error['ctx']['min_length']}"
        case "too_long":
            return f" is too long; send at most {error['ctx']['max_length']}"
    return None


def _fields(kind: type[BaseModel], path: Sequence[int | str]) -> Sequence[str]:
    """The fields of the object at `path`; empty if it is not a plain model or has too many."""
    for part in path:
        field = kind.model_fields.get(str(part))
        inner = () if field is None else (field.annotation, *get_args(field.annotation))
        models = [arg for arg in inner if isinstance(arg, type) and issubclass(arg, BaseModel)]
        # Unions and lists of models have no single set of fields.
        if len(models) != 1:
            return ()
        (kind,) = models
    return tuple(kind.model_fields) if path and len(kind.model_fields) <= FIELDS_LISTED_MAX else ()
