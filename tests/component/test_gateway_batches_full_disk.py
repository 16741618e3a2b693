"""A full batch disk pauses batches and makes their API return 503; all else is unaffected."""

from pathlib import Path

import httpx
import openai
import pytest

from services.common.etcd import Store
from tests.support.batches import CHAT, as_file, chat_lines, ended, results, submit
from tests.support.client import open_client
from tests.support.fake_cluster import fake_cluster
from tests.support.full_disk import small_disk
from tests.support.gateway import endless
from tests.support.gateway_process import gateway_process
from tests.support.waiting import eventually

LINES = chat_lines(24)


async def test_a_full_disk_pauses_batches_but_not_online_requests(
    store: Store, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    with small_disk(tmp_path / "disk") as disk:
        async with (
            fake_cluster(store, endless, max_model_len=256) as cluster,
            gateway_process(
                cluster, tmp_path / "own", batch_store=f"sqlite:///{tmp_path}/disk/batches.db"
            ) as gateway,
            open_client(gateway.url) as client,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        ):
            worker = cluster.workers[0]
            worker.pause_at = 5
            batch = await submit(client, as_file(LINES))
            await eventually(lambda: len(worker.active) >= 16)
            disk.fill()
            try:
                worker.pause_at = None
                worker.go.set()
                with pytest.raises(openai.InternalServerError) as raised:
                    await submit(client.with_options(max_retries=0), b"x" * 2**20)
                assert raised.value.status_code == 503
                online = await http.post(CHAT, json=LINES[0]["body"])
                assert online.status_code == 200
                assert (await client.batches.retrieve(batch.id)).status == "in_progress"
            finally:
                disk.free()
            batch = await ended(client, batch.id)
            assert batch.status == "completed"
            answers = await results(client, batch.output_file_id)
            assert [answer["custom_id"] for answer in answers] == [
                line["custom_id"] for line in LINES
            ]
