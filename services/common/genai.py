"""Names of the attributes of exported spans.

`gen_ai.*` names follow OpenTelemetry's GenAI conventions, which are still in development and no
longer part of its Python package; `gen_ai.latency.*` are vLLM's names, which existing dashboards
show. `tideserve.*` names are our own.
"""

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
OUTPUT_TYPE = "gen_ai.output.type"

REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"

RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"

USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

# In seconds.
LATENCY_TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_TIME_IN_MODEL_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_TIME_IN_MODEL_DECODE = "gen_ai.latency.time_in_model_decode"

ERROR_TYPE = "error.type"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"

REQUEST_ID = "tideserve.request.id"
OWNER = "tideserve.owner"
WORKER = "tideserve.worker"
GROUP = "tideserve.group"
EPOCH = "tideserve.epoch"
FROM_WORKER = "tideserve.from_worker"
TO_WORKER = "tideserve.to_worker"
TIMES_FROM = "tideserve.times_from"

CHANGE_CAUSE = "tideserve.change.cause"
CHANGE_TEXT = "tideserve.change.text"
CHANGE_ACTION = "tideserve.change.action"
CHANGE_GROUPS = "tideserve.change.groups"
CHANGE_EPOCH = "tideserve.change.epoch"
CHANGE_NUMBER = "tideserve.change."
"""Prefix of attributes with the figures on which the decision for a group change is based."""
