"""Users in an etcd for tests: each may access its key prefix, and its password is its name."""

from collections.abc import Mapping

import grpc
import grpc.aio
from etcd3aio.auth import AuthService, PermissionType

from tests.support.etcd_server import EtcdServer


async def enable_users(etcd: EtcdServer, prefixes: Mapping[str, str]) -> None:
    """Enable authentication with these users and root."""
    trust = grpc.ssl_channel_credentials(etcd.ca_file.read_bytes())
    async with grpc.aio.secure_channel(etcd.endpoint, trust) as channel:
        auth = AuthService(channel)
        for user, prefix in prefixes.items():
            end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
            await auth.user_add(user, user)
            await auth.role_add(user)
            await auth.role_grant_permission(user, prefix, end, perm_type=PermissionType.READWRITE)
            await auth.user_grant_role(user, user)
        await auth.user_add("root", "root")
        await auth.user_grant_role("root", "root")
        await auth.auth_enable()
