"""Checked bodies: strict models, and one sentence for what is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from services.gateway.api.parameters import shown
from services.gateway.vocabulary.errors import BadRequest

M = TypeVar("M", bound=BaseModel)
FIELDS_SHOWN = 12
"""An object with more fields is not told whole to whoever sends another one."""


class Strict(BaseModel):
    """Checked types and ranges, without conversions; unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def validated(kind: type[M], fields: Mapping[str, Any]) -> M:
    """An object of the model `kind`; raises BadRequest that names the first wrong field."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = shown(".".join(str(part)[:64] for part in first["loc"])) or None
        complaint = _complaint(first, where, _fields(kind, first["loc"][:-1]))
        raise BadRequest(f"'{where}'{complaint}", param=where) from None


def _complaint(error: ErrorDetails, where: str | None, known: Sequence[str]) -> str:
    """What is wrong with the field, behind its name; `known`: those where it stands."""
    if error["type"] == "extra_forbidden" and known:
        return f" is not a field; there are {', '.join(known)}"
    return _remedy(error, where) or f": {error['msg'][0].lower()}{error['msg'][1:]}"


def _remedy(error: ErrorDetails, where: str | None) -> str | None:
    """In our words; None where those of the check do."""
    match error["type"]:
        case "model_type":
            return " is not an object; send one in braces"
        case "missing" if where == "model":
            return " is missing; name the served model, which /v1/models lists"
        case "missing":
            return " is missing; send it"
        case "too_short":
            return f" is too short; send a list of at least {error['ctx']['min_length']}"
        case "too_long":
            return f" is too long; send a list of at most {error['ctx']['max_length']}"
    return None


def _fields(kind: type[BaseModel], path: Sequence[int | str]) -> Sequence[str]:
    """The fields of the object at `path`, if it is plain and has few."""
    for part in path:
        field = kind.model_fields.get(str(part))
        inner = () if field is None else (field.annotation, *get_args(field.annotation))
        models = [one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)]
        if len(models) != 1:
            return ()
        (kind,) = models
    return tuple(kind.model_fields) if path and len(kind.model_fields) <= FIELDS_SHOWN else ()
