"""Roles in certificates, and the DNS names that represent them.

A role is the DNS name `<role>.tideserve.internal` in a certificate's subject alternative names; a
certificate may contain several. No host has such a name, so the certificate of a host called
"gateway" does not grant the role of a gateway.
"""

GATEWAY, SCHEDULER, MEMMGR, WORKER = SERVICE_ROLES = ("gateway", "scheduler", "memmgr", "worker")
ADMIN = "admin"
ROLES = (*SERVICE_ROLES, ADMIN)
DOMAIN = ".tideserve.internal"


def name_of(role: str) -> str:
    """The DNS name that grants `role` to a certificate's holder."""
    return f"{role}{DOMAIN}"
