"""Parses and checks the bodies that clients send, and describes all bodies as JSON Schema.

The package covers responses, chat, completions and generations of tokens: request fields, input items,
messages, formats, tools and events. The rest of the server imports its names from here.
"""

from __future__ import annotations

from server.items import Item
from server.schema.anthropic import (
    MessagesRequest,
    in_words_of_messages,
    parse_count,
    parse_messages,
    words_of_messages,
)
from server.schema.chat import ChatRequest, ChatStreamOptions, echoed, parse_chat
from server.schema.completions import CompletionRequest, parse_completion
from server.schema.description import FILE_PURPOSES, STATUSES, components
from server.schema.fields import PRIORITIES, Api, SamplingFields, effective_tier, is_tier, tier_of
from server.schema.forks import Fork, parse_fork
from server.schema.formats import TEXT, as_output
from server.schema.generate import parse_generation, words_of_generation
from server.schema.items import (
    check_sizes,
    normalize_input,
    normalize_item,
    num_parts,
    unsupported_parts,
    without_trigger,
)
from server.schema.messages import authors, file_paths, image_paths, unsupported_in
from server.schema.plain_fields import completion_name
from server.schema.prompt_templates import PromptBody, parse_new_prompt, parse_prompt_change
from server.schema.prompts import LEAD, FilledPrompt, fill, parse_prompt, variables_of, version_number
from server.schema.responses import (
    INCLUDES,
    LEAST_THRESHOLD,
    MAX_TOOL_TIMEOUT_S,
    CreateResponse,
    ToolOutputs,
    check_metadata,
    configured,
    echo,
    parse_compact,
    parse_create,
    parse_include,
    parse_input_tokens,
    parse_tool_outputs,
)
from server.schema.search import Search, num_requests
from server.schema.tools import (
    Unsupported,
    leave_out,
    leave_out_lacking,
    require_added_offered,
    require_search,
    secrets_of_items,
)
from server.shapes import array, boolean, check_length, missing, mistyped, refuse, shorten, text

__all__ = [
    "FILE_PURPOSES",
    "INCLUDES",
    "LEAD",
    "LEAST_THRESHOLD",
    "MAX_TOOL_TIMEOUT_S",
    "PRIORITIES",
    "STATUSES",
    "TEXT",
    "Api",
    "ChatRequest",
    "ChatStreamOptions",
    "CompletionRequest",
    "CreateResponse",
    "FilledPrompt",
    "Fork",
    "Item",
    "MessagesRequest",
    "PromptBody",
    "SamplingFields",
    "Search",
    "ToolOutputs",
    "Unsupported",
    "array",
    "as_output",
    "authors",
    "boolean",
    "check_length",
    "check_metadata",
    "check_sizes",
    "completion_name",
    "components",
    "configured",
    "echo",
    "echoed",
    "effective_tier",
    "file_paths",
    "fill",
    "image_paths",
    "in_words_of_messages",
    "is_tier",
    "leave_out",
    "leave_out_lacking",
    "missing",
    "mistyped",
    "normalize_input",
    "normalize_item",
    "num_parts",
    "num_requests",
    "parse_chat",
    "parse_compact",
    "parse_completion",
    "parse_count",
    "parse_create",
    "parse_fork",
    "parse_generation",
    "parse_include",
    "parse_input_tokens",
    "parse_messages",
    "parse_new_prompt",
    "parse_prompt",
    "parse_prompt_change",
    "parse_tool_outputs",
    "refuse",
    "require_added_offered",
    "require_search",
    "secrets_of_items",
    "shorten",
    "text",
    "tier_of",
    "unsupported_in",
    "unsupported_parts",
    "variables_of",
    "version_number",
    "without_trigger",
    "words_of_generation",
    "words_of_messages",
]
