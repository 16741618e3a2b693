"""tours.task.CITY_SCHEMA as people write it for clients that take models of pydantic's."""

from typing import Literal

import pydantic


class City(pydantic.BaseModel):
    """The capital of a country."""

    city: Literal["Paris", "London", "Rome"]
    millions: int = pydantic.Field(ge=0, le=99)
