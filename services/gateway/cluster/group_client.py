"""Merges and splits groups, and moves requests, through the memory manager."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from services.common.grpc_client import Dial
from services.gateway.cluster import translate
from services.gateway.cluster.cluster_view import ClusterView
from services.gateway.vocabulary.errors import BadRequest, GatewayError, ServiceUnavailable
from services.gateway.vocabulary.message import GroupStep, RequestsMoved
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc

# Longer than any timeout of the memory manager.
CHANGE_TIMEOUT_S = 900.0
RETRY_AFTER_S = 5.0


class GroupClient:
    """Sends orders of operators to the leading memory manager."""

    def __init__(self, view: ClusterView, dial: Dial) -> None:
        self._view = view
        self._dial = dial

    def merge(self, group_ids: Sequence[str]) -> AsyncIterator[GroupStep]:
        """Merge these groups, or all groups if `group_ids` is empty; yields the change's steps.

        Raises:
            GatewayError: if the change is refused, or the memory manager does not respond.
        """
        request = memmgr_pb2.MergeGroupsRequest(group_ids=group_ids)
        return self._change(lambda stub: stub.MergeGroups(request, timeout=CHANGE_TIMEOUT_S))

    def split(self, group_id: str | None, parts: int | None) -> AsyncIterator[GroupStep]:
        """Split a group; yields the steps of the change.

        `group_id`: None for the only merged group. `parts`: number of new groups; None for single
        workers. Raises as `merge`.
        """
        request = memmgr_pb2.SplitGroupRequest(group_id=group_id or "", parts=parts or 0)
        return self._change(lambda stub: stub.SplitGroup(request, timeout=CHANGE_TIMEOUT_S))

    async def move(
        self, source: str, target: str | None, requests_max: int | None
    ) -> RequestsMoved:
        """Move running requests from worker `source` to worker `target`.

        `target`: None for the worker with the most free KV. `requests_max`: None for all requests
        that can move. Raises as `merge`.
        """
        request = memmgr_pb2.MoveRequestsRequest(
            source_worker_id=source, target_worker_id=target or "", requests_max=requests_max or 0
        )
        async with self._dial(self._address(), "memmgr") as channel:
            stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
            try:
                answer = await stub.MoveRequests(request, timeout=CHANGE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise _to_gateway_error(error, "move the requests") from error
        return RequestsMoved(answer.target_worker_id, answer.moved, answer.kept, answer.reason)

    async def _change(self, call: Callable[[Any], AsyncIterator[Any]]) -> AsyncIterator[GroupStep]:
        async with self._dial(self._address(), "memmgr") as channel:
            stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
            try:
                async for answer in call(stub):
                    yield translate.group_step(answer.step)
            except grpc.aio.AioRpcError as error:
                raise _to_gateway_error(error, "change the groups") from error

    def _address(self) -> str:
        address = self._view.address_of("memmgr")
        if address is None:
            raise ServiceUnavailable(
                "no memory manager is leading; retry in a few seconds",
                retry_after_s=RETRY_AFTER_S,
            )
        return address


def _to_gateway_error(error: grpc.aio.AioRpcError, action: str) -> GatewayError:
    """The error for a client whose call failed to do `action`."""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return BadRequest(error.details() or f"the memory manager refused to {action}")
    return ServiceUnavailable(
        f"the memory manager could not {action} ({error.details() or error.code().name});"
        " retry in a few seconds",
        retry_after_s=RETRY_AFTER_S,
    )
