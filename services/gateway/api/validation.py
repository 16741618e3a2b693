"""Checked bodies: strict models, and one sentence for what is wrong."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from services.gateway.api.parameters import shown
from services.gateway.vocabulary.errors import BadRequest

M = TypeVar("M", bound=BaseModel)


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
        raise BadRequest(f"'{where}'{_complaint(first, where)}", param=where) from None


def _complaint(error: ErrorDetails, where: str | None) -> str:
    """What is wrong with the field, behind its name."""
    match error["type"]:
        case "missing" if where == "model":
            return " is missing; name the served model, which /v1/models lists"
        case "missing":
            return " is missing; send it"
        case "too_short":
            return f" is too short; send a list of at least {error['ctx']['min_length']}"
        case "too_long":
            return f" is too long; send a list of at most {error['ctx']['max_length']}"
    return f": {error['msg'][0].lower()}{error['msg'][1:]}"
