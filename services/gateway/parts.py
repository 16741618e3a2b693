"""Creates parts of the gateway from its configuration, such as the model and batches."""

import logging
import os
from pathlib import Path

from prometheus_client import CollectorRegistry
from sqlalchemy.engine import make_url

from services.common.errors import ConfigError
from services.common.etcd import Store
from services.common.grpc_client import Dial
from services.core.service import ServiceClass
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.object_files import ObjectFiles
from services.gateway.batches.service import BatchService
from services.gateway.batches.store import BatchStore
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.cluster_metrics import ClusterMetrics
from services.gateway.cluster.cluster_view import ClusterView
from services.gateway.config import GatewayConfig
from services.gateway.http.line_door import LineDoor
from services.gateway.http.openai import dialects_of
from services.gateway.keys.key_ring import KeyRing
from services.gateway.keys.quotas import Quotas
from services.gateway.model.sampling import PLAIN_DEFAULTS
from services.gateway.model.served_model import ServedModel, load_model
from services.gateway.records.request_record import StreamRecord
from services.gateway.serving.service_policy import ServicePolicy
from services.gateway.serving.serving import RequestServing
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.class_targets import class_targets
from tideserve.common.v1 import record_pb2

log = logging.getLogger(__name__)


def open_model(config: GatewayConfig) -> ServedModel:
    """Load the served model's metadata and tokenizer. Raises ConfigError."""
    model = load_model(
        config.model_name,
        config.model_dir,
        [name.strip() for name in config.model_aliases.split(",") if name.strip()],
        own_defaults=config.generation_config == "auto",
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
        user_tokens=config.user_special_tokens,
    )
    if model.defaults != PLAIN_DEFAULTS:
        log.info("sampling defaults from generation_config.json: %s", model.defaults)
    return model


def service_policy(config: GatewayConfig) -> ServicePolicy:
    """How requests select their class, targets, tenant and session."""
    return ServicePolicy(
        class_targets(config.classes),
        ServiceClass(config.default_class),
        config.fairness_header,
        config.session_affinity,
    )


def open_cluster_metrics(
    config: GatewayConfig, view: ClusterView, admission: AdmissionClient, dial: Dial, store: Store
) -> ClusterMetrics | None:
    """The cluster's metrics for the HTTP port; None if the configuration turns them off."""
    if not config.cluster_metrics:
        return None
    cluster = ClusterClient(view, dial, store).cluster
    return ClusterMetrics(cluster, view, admission, config.model_name)


def open_batches(
    config: GatewayConfig,
    model: ServedModel,
    serving: RequestServing,
    pool: TextPool,
    keys: KeyRing,
    quotas: Quotas,
    registry: CollectorRegistry,
    etcd: Store,
    incarnation: str,
    stream_record: StreamRecord,
) -> BatchService | None:
    """The batches of a gateway; None unless its configuration has a store.

    Raises:
        ConfigError: if the store or the folder of files cannot be used.
    """
    settings = config.batches
    if settings.batch_store is None:
        return None
    metrics = BatchMetrics(registry)
    store = BatchStore(settings.batch_store, metrics.observe_call, stream_record.log)
    files = ObjectFiles(files_url(settings.batch_store, settings.batch_files))
    dialects = dialects_of(model, pool, refuse_unknown=serving.refuse_unknown)
    return BatchService(
        settings,
        store,
        files,
        LineDoor(serving, pool, keys, quotas, dialects, incarnation),
        metrics,
        etcd,
        record_pb2.ServiceRecord(name="gateway", incarnation=incarnation, pid=os.getpid()),
        config.lease_ttl_s,
    )


def files_url(store: str, files: str | None) -> str:
    """Where the contents of files are: `files`, or beside the SQLite of `store`.

    Raises:
        ConfigError: if `store` is another database and `files` is None.
    """
    if files is not None:
        return files
    url = make_url(store)
    if url.get_backend_name() != "sqlite" or not url.database:
        raise ConfigError(
            "'batch_store' is shared, so 'batch_files' must name a place that all gateways reach;"
            " set it to a URL such as s3://BUCKET/FOLDER"
        )
    return str(Path(url.database).with_name("files"))
