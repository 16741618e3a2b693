"""The admin port for operators: live page, status, metrics, merge and split of groups."""
