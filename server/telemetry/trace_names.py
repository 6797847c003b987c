"""Names of spans' attributes, as OpenTelemetry's semantic conventions have them (GenAI as of 0.66b2).

Those for generative models are still incubating, so they stand here and nowhere else.
"""

from __future__ import annotations

PROVIDER = "antiphon"

# HTTP
METHOD = "http.request.method"
ROUTE = "http.route"
STATUS = "http.response.status_code"
PATH = "url.path"
CLIENT = "client.address"
ERROR = "error.type"

# Generations
OPERATION = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
SEED = "gen_ai.request.seed"
STOP = "gen_ai.request.stop_sequences"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"

# Tools
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
MCP_METHOD = "mcp.method.name"

# Ours, where the conventions have none
REQUEST_ID = "antiphon.request_id"
REQUEST_TRACE = "antiphon.request_trace"
QUEUE_S = "antiphon.queue_seconds"
PREFILL_S = "antiphon.prefill_seconds"

# Events of a generation
PREFILL = "antiphon.prefill"
FIRST_TOKEN = "antiphon.first_token"
