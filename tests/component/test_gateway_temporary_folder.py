"""The gateway needs no temporary folder: a full disk does not keep it from starting."""

import tempfile
from pathlib import Path

import grpc.aio
import pytest

from services.common.etcd import Store
from tests.support.byte_tokenizer import write_model_folder
from tests.support.fake_cluster import fake_cluster
from tests.support.gateway import TIMEOUT_S, endless, gateway_before
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc


async def test_the_gateway_serves_without_a_temporary_folder(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model_folder(tmp_path)
    async with fake_cluster(store, endless, 1) as cluster:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        async with gateway_before(cluster, tmp_path, expected_workers=1) as case:
            assert (await case.http.get("/v1/models", timeout=TIMEOUT_S)).status_code == 200
            async with grpc.aio.insecure_channel(case.target) as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                assert await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)
