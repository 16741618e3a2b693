"""What a certificate makes its holder: the roles, and the names that stand for them.

A role is the DNS name `<role>.tideserve.internal` in the certificate's subject alternative names; a
certificate may name several. A name of its own, rather than a host's, so that the certificate of
some host called "gateway" never makes anybody a gateway.
"""

GATEWAY, SCHEDULER, MEMMGR, WORKER = SERVICE_ROLES = ("gateway", "scheduler", "memmgr", "worker")
ADMIN = "admin"
ROLES = (*SERVICE_ROLES, ADMIN)
DOMAIN = ".tideserve.internal"


def name_of(role: str) -> str:
    """The DNS name in a certificate that makes its holder one of `role`."""
    return f"{role}{DOMAIN}"
