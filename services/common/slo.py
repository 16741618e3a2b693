"""Converts the service level (class, SLO targets, tenant) of a request to and from protobuf."""

from services.common.wire_enum import numbers
from services.core.service import Service, ServiceClass
from tideserve.common.v1 import service_pb2

_CLASSES = numbers(ServiceClass, service_pb2.ServiceClass, "SERVICE_CLASS")
_BY_NUMBER = {number: service_class for service_class, number in _CLASSES.items()}


def service_message(service: Service) -> service_pb2.Service:
    """The message of a service level; unset targets are 0."""
    return service_pb2.Service(
        service_class=_CLASSES[service.service_class],
        ttft_s=service.ttft_s or 0.0,
        tpot_s=service.tpot_s or 0.0,
        token_group=service.token_group,
        rank=service.rank,
        tenant=service.tenant,
    )


def to_class(number: int) -> ServiceClass:
    """The class with this number; a class unknown to this version is read as standard."""
    return _BY_NUMBER.get(number, ServiceClass.STANDARD)


def to_service(message: service_pb2.Service) -> Service:
    """The service level in a message, not validated (see `Service.fault`).

    A missing message is `DEFAULT_SERVICE`; a class unknown to this version is read as standard.
    """
    return Service(
        service_class=to_class(message.service_class),
        ttft_s=message.ttft_s or None,
        tpot_s=message.tpot_s or None,
        token_group=message.token_group or 1,
        rank=message.rank,
        tenant=message.tenant,
    )
