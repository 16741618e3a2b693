"""Co-serving of online requests and a backlog of batch requests: figures, bars, tables."""
