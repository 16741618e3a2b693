"""Names and buckets of vLLM's metrics, with which its dashboards also show tideserve's.

Names, labels and bounds follow /metrics of vLLM 0.32. Counters end in `_total` there; the
Prometheus client adds that suffix.
"""

LABELS = ("model_name", "engine")
"""Labels; `engine` is a worker's id, or `QUEUE_ENGINE`."""
QUEUE_ENGINE = "queue"
"""Value of the label `engine` for the scheduler's queue in `vllm:num_requests_waiting`."""
WAITING = "vllm:num_requests_waiting"
WAITING_HELP = "Waiting requests: at a worker, or in the scheduler's queue (engine `queue`)."

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)


def token_count_buckets(maximum: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 and so on, up to `maximum` tokens."""
    bounds = []
    unit = 1
    while unit <= maximum:
        bounds += [unit * digit for digit in (1, 2, 5) if unit * digit <= maximum]
        unit *= 10
    return tuple(bounds)
