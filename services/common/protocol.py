"""Version of the protocol between the workers of a group: transfers (lanes) and group changes.

Increase it with every change of frames, handshake or group protocol that a worker of the previous
version would misread. Workers of different versions may serve in the same cluster, but never in the
same group. Messages between services (gRPC, etcd records) are not versioned: fields are only added,
which `buf breaking` checks.
"""

PROTOCOL_VERSION = 5
