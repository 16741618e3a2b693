"""Routes for operators: merge and split groups by hand."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from services.gateway.cluster.group_client import GroupClient
from services.gateway.http.sse import DONE, event
from services.gateway.vocabulary.errors import GatewayError
from services.gateway.vocabulary.message import GroupStep

GROUPS_MAX = 64

Names = Annotated[list[str], Query(max_length=GROUPS_MAX)]


def router(groups: GroupClient) -> APIRouter:
    """The routes; each answers with server-sent events, one for every step."""
    routes = APIRouter()

    @routes.post("/tideserve/v1/groups/merge", response_class=StreamingResponse)
    async def merge(group: Names = []) -> Response:  # noqa: B006  # FastAPI copies it
        """Merge the groups in the order given; all groups if none is."""
        return await _streamed(groups.merge(group))

    @routes.post("/tideserve/v1/groups/split", response_class=StreamingResponse)
    async def split(group: Annotated[str | None, Query(max_length=256)] = None) -> Response:
        """Split the group; the only merged one if none is given."""
        return await _streamed(groups.split(group))

    return routes


async def _streamed(steps: AsyncIterator[GroupStep]) -> Response:
    """The steps as they come; what is refused at once is an error with its status."""
    first = await anext(steps)
    return StreamingResponse(_events(first, steps), media_type="text/event-stream")


async def _events(first: GroupStep, steps: AsyncIterator[GroupStep]) -> AsyncIterator[bytes]:
    yield _event(first)
    try:
        async for step in steps:
            yield _event(step)
    except GatewayError as error:
        yield event(error.body())
        return
    yield DONE


def _event(step: GroupStep) -> bytes:
    return event({"phase": step.phase, "epoch": step.epoch, "message": step.message})
