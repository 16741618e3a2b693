"""What a request is promised, as the contracts with scheduler and workers have it."""

from services.core.service import Service, ServiceClass
from tideserve.common.v1 import service_pb2

_CLASSES = {
    ServiceClass.INTERACTIVE: service_pb2.SERVICE_CLASS_INTERACTIVE,
    ServiceClass.STANDARD: service_pb2.SERVICE_CLASS_STANDARD,
    ServiceClass.BATCH: service_pb2.SERVICE_CLASS_BATCH,
}


def service_message(service: Service) -> service_pb2.Service:
    """The promise; what is not promised stays 0."""
    return service_pb2.Service(
        service_class=_CLASSES[service.service_class],
        ttft_s=service.ttft_s or 0.0,
        tpot_s=service.tpot_s or 0.0,
        token_group=service.token_group,
        rank=service.rank,
        tenant=service.tenant,
    )
