"""The scenarios. To add a scenario, add a module of its name with `SCENARIO` and a line here."""

SUMMARIES = {
    "batch": "online requests in phases beside a batch of /v1/batches: their latency, its tokens",
    "buckets": "batch requests of mixed lengths by arrival and by bucket, if engines pad or not",
    "burst": "a slice of a real trace whose KV demand overflows the workers' memory",
    "churn": "merges and splits in a row under load: requests, memory, invariants I1-I11",
    "clients": "loads of `steady` by vllm bench serve and guidellm: tideserve / vLLM, a core each",
    "coserve": "batch work in the time left by online requests: tokens gained, and their cost",
    "disagg": "prompts and answers at different workers: gaps between tokens, targets met",
    "drain": "all workers are replaced one after the other under 64 streams: pauses, lost requests",
    "drop": "the pause of a drop of layers, and activations beside bulk data",
    "faults": "kills, freezes and cuts in each phase of a change-over, or at random with floods",
    "flood": "the burst with batch work behind it: effect on online requests",
    "front": "vLLM as the engine of workers: cost of the control plane, gain of its dispatch",
    "models": "two models behind one gateway and behind two: memory, throughput, a flood of one",
    "overhead": "control-plane latency added to TTFT; planning share of iteration time",
    "overload": "1 to 10 times the load that fits: requests in time, refusals, recovery",
    "prefix": "savings of a prefix cache, and hit rates of the dispatch policies",
    "realtime": "real-time requests with targets beside best-effort ones: targets met, their cost",
    "rebalance": "streams that outgrow one of two workers: preemptions and merges, if they move",
    "recovery": "steady streams after a burst that merged all workers: time to the split, TPOT",
    "steady": "closed loops: one at a time, decode-heavy, many, mixed, prefill-heavy",
    "upstreams": "two servers behind one gateway and behind round-robin: P99 to the first token",
    "survive": "a worker is killed and etcd stops: no request fails, other workers keep serving",
}
"""Summaries by name. `tideserve --help` reads them without importing the scenarios."""
