"""The admin port: the live page, the cluster's state and what changes it."""
