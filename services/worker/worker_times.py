"""Names and texts of the metrics of the time that workers spend, by the field that has it."""

WORKER_TIMES = {
    "pipeline_busy_s": (
        "pipeline_busy_seconds",
        "Time in which the worker, as a stage of a pipeline, ran microbatches.",
    ),
    "pipeline_bubble_s": (
        "pipeline_bubble_seconds",
        "Time in which it was idle while a microbatch was anywhere in its pipeline.",
    ),
    "prefill_s": (
        "prefill_seconds",
        "Time of iterations with a chunk of more than one token; 0 without a profile.",
    ),
    "prefill_predicted_s": (
        "prefill_predicted_seconds",
        "Time of iterations with a chunk of more than one token, as the cost model predicted it;"
        " 0 without a profile.",
    ),
    "decode_s": ("decode_seconds", "Time of iterations that only decode; 0 without a profile."),
    "decode_predicted_s": (
        "decode_predicted_seconds",
        "Time of iterations that only decode, as the cost model predicted it; 0 without a profile.",
    ),
}
