"""Request bodies: fields, defaults and checks, shared by the HTTP and gRPC APIs."""
