"""Online requests beside a backlog of batch requests: figures, bars, tables."""
