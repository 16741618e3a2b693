"""The version of what workers say to each other in a group: over their lanes, and about changes.

Raise it with every change of frames, handshake or group protocol that a worker of the version
before would misread. Workers of different versions serve side by side, and never in one group.
Messages between services (gRPC, records in etcd) have no number: fields are only ever added there,
which `buf breaking` checks.
"""

PROTOCOL_VERSION = 3
