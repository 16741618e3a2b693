"""Creates parts of the gateway from its configuration, such as the models and batches."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
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
from services.gateway.bounds.drain import Drain
from services.gateway.cluster.adapter_directory import AdapterDirectory
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.cluster_metrics import ClusterMetrics
from services.gateway.cluster.cluster_view import ClusterView, ModelView
from services.gateway.cluster.readiness import GatewayReadiness, ReadinessProbe
from services.gateway.cluster.worker_client import WorkerClient
from services.gateway.config import GatewayConfig
from services.gateway.http.line_door import LineDoor
from services.gateway.http.openai import dialects_of
from services.gateway.keys.key_ring import KeyRing
from services.gateway.keys.quotas import Quotas
from services.gateway.model.sampling import PLAIN_DEFAULTS
from services.gateway.model.served_model import ServedModel, load_model
from services.gateway.model.settings import ModelSettings
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import StreamRecord
from services.gateway.serving.adapter_loader import AdapterLoader
from services.gateway.serving.choice_runner import ChoiceRunner
from services.gateway.serving.early_asks import EarlyAsks
from services.gateway.serving.model_registry import ModelEntry
from services.gateway.serving.prepare import Preparer
from services.gateway.serving.service_policy import ServicePolicy
from services.gateway.serving.serving import RequestServing
from services.gateway.structure.checker import GrammarChecker
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.class_targets import class_targets
from tideserve.common.v1 import record_pb2

log = logging.getLogger(__name__)


def open_models(config: GatewayConfig) -> list[ServedModel]:
    """Load the metadata and tokenizer of each served model, in parallel. Raises ConfigError."""
    with ThreadPoolExecutor(config.tokenizer_threads) as threads:
        return list(threads.map(_open_model, config.served_models))


def _open_model(settings: ModelSettings) -> ServedModel:
    model = load_model(
        settings.name,
        settings.dir,
        settings.aliases,
        own_defaults=settings.generation_config == "auto",
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
        user_tokens=settings.user_special_tokens,
    )
    if model.defaults != PLAIN_DEFAULTS:
        log.info(
            "sampling defaults of %s from generation_config.json: %s", model.name, model.defaults
        )
    return model


def service_policy(config: GatewayConfig) -> ServicePolicy:
    """How requests select their class, targets, tenant and session."""
    return ServicePolicy(
        class_targets(config.classes),
        ServiceClass(config.default_class),
        config.fairness_header,
        config.session_affinity,
    )


def model_entry(
    config: GatewayConfig,
    model: ServedModel,
    checker: GrammarChecker,
    pool: TextPool,
    policy: ServicePolicy,
    view: ModelView,
    admission: AdmissionClient,
    workers: WorkerClient,
    metrics: Metrics,
    stream_record: StreamRecord,
) -> ModelEntry:
    """What prepares and runs the requests of a model."""

    def prefix_block_size() -> int:
        # 0 unless the scheduler ranks workers by cached prefixes: then no prompt is hashed.
        heartbeat = admission.heartbeat
        wanted = heartbeat is not None and heartbeat.wants_prefixes
        return view.block_size if wanted else 0

    preparer = Preparer(
        model,
        pool,
        lambda: view.max_model_len or model.context_tokens,
        checker,
        prefix_block_size,
        policy,
        EarlyAsks(admission, model.name) if config.early_asks else None,
    )
    choices = ChoiceRunner(
        admission,
        workers,
        model.tokenizer,
        pool,
        metrics,
        metrics.of(model.name),
        stream_record,
        config.resume_streams,
        view.resumes_grammars,
    )
    weight = next(m.quota_weight for m in config.served_models if m.name == model.name)
    return ModelEntry(model, preparer, choices, weight)


def adapter_loader(
    config: GatewayConfig, adapters: AdapterDirectory, view: ClusterView
) -> AdapterLoader:
    """What loads adapters of the served models."""
    models = config.served_models
    return AdapterLoader(
        adapters,
        config.adapter_roots,
        {model.name: model.dir for model in models},
        {name: model.name for model in models for name in (model.name, *model.aliases)},
        view.adapter_rank_max,
    )


def open_readiness(
    config: GatewayConfig, view: ClusterView, admission: AdmissionClient, drain: Drain
) -> GatewayReadiness:
    """The readiness of each model, and of the gateway."""
    probes = {
        model.name: ReadinessProbe(
            *(view.of(model.name), admission, drain),
            *(model.expected_workers, config.expected_wait_s),
        )
        for model in config.served_models
    }
    return GatewayReadiness(probes, admission, needs_all=config.ready_models == "all")


def open_cluster_metrics(
    config: GatewayConfig, view: ClusterView, admission: AdmissionClient, dial: Dial, store: Store
) -> ClusterMetrics | None:
    """The cluster's metrics for the HTTP port; None if the configuration turns them off."""
    if not config.cluster_metrics:
        return None
    cluster = ClusterClient(view, dial, store).cluster
    return ClusterMetrics(cluster, view, admission, [m.name for m in config.served_models])


def open_batches(
    config: GatewayConfig,
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
    dialects = dialects_of(pool, refuse_unknown=serving.refuse_unknown)
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
