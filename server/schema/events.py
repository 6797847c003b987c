"""Every event of a response's stream: its fields, and the grammar of their order, in one table.

Owns the vocabulary. Refuses to build events (`server.runs.events.assembler`) and to number or send them. What
emits events is checked in tests against this table and against the OpenAPI document, of which it is the short
form. One event is ours: `response.cancelled`, after the name of the official webhook.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from storage import TERMINAL_STATUSES

_PLACE = "item_id output_index"
_PART = f"{_PLACE} content_index"
_SUMMARY = f"{_PLACE} summary_index"
_COMMAND = "output_index command_index"

FIELDS: Mapping[str, tuple[str, ...]] = {
    name: tuple(fields.split())
    for names, fields in {
        # The response: a whole snapshot each time.
        "response.created response.queued response.in_progress": "response",
        "response.completed response.incomplete response.failed response.cancelled": "response",
        "error": "code message param",
        # Items and parts.
        "response.output_item.added response.output_item.done": "output_index item",
        "response.content_part.added response.content_part.done": f"{_PART} part",
        # Text and refusals.
        "response.output_text.delta": f"{_PART} delta logprobs",
        "response.output_text.done": f"{_PART} text logprobs",
        "response.output_text.annotation.added": f"{_PART} annotation_index annotation",
        "response.refusal.delta": f"{_PART} delta",
        "response.refusal.done": f"{_PART} refusal",
        # Reasoning.
        "response.reasoning_text.delta": f"{_PART} delta",
        "response.reasoning_text.done": f"{_PART} text",
        "response.reasoning_summary_part.added response.reasoning_summary_part.done": f"{_SUMMARY} part",
        "response.reasoning_summary_text.delta": f"{_SUMMARY} delta",
        "response.reasoning_summary_text.done": f"{_SUMMARY} text",
        # Calls that the client executes.
        "response.function_call_arguments.delta": f"{_PLACE} delta",
        "response.function_call_arguments.done": f"{_PLACE} name arguments",
        "response.custom_tool_call_input.delta": f"{_PLACE} delta",
        "response.custom_tool_call_input.done": f"{_PLACE} input",
        "response.shell_call_command.added response.shell_call_command.done": f"{_COMMAND} command",
        "response.shell_call_command.delta": f"{_COMMAND} delta",
        "response.shell_call_output_content.delta": f"{_PLACE} command_index delta",
        "response.shell_call_output_content.done": f"{_PLACE} command_index output",
        # Tools that a server executes.
        "response.web_search_call.in_progress response.web_search_call.searching": _PLACE,
        "response.web_search_call.completed": _PLACE,
        "response.file_search_call.in_progress response.file_search_call.searching": _PLACE,
        "response.file_search_call.completed": _PLACE,
        "response.code_interpreter_call.in_progress response.code_interpreter_call.interpreting": _PLACE,
        "response.code_interpreter_call.completed": _PLACE,
        "response.code_interpreter_call_code.delta": f"{_PLACE} delta",
        "response.code_interpreter_call_code.done": f"{_PLACE} code",
        "response.image_generation_call.in_progress response.image_generation_call.generating": _PLACE,
        "response.image_generation_call.partial_image": f"{_PLACE} partial_image_index partial_image_b64",
        "response.image_generation_call.completed": _PLACE,
        "response.mcp_list_tools.in_progress response.mcp_list_tools.completed": _PLACE,
        "response.mcp_list_tools.failed": _PLACE,
        "response.mcp_call.in_progress response.mcp_call.completed response.mcp_call.failed": _PLACE,
        "response.mcp_call_arguments.delta": f"{_PLACE} delta",
        "response.mcp_call_arguments.done": f"{_PLACE} arguments",
        # Audio: older than items, and never sent here.
        "response.audio.delta": "delta",
        "response.audio.transcript.delta": "response_id delta",
        "response.audio.done response.audio.transcript.done": "response_id",
    }.items()
    for name in names.split()
}
"""Event type -> the fields that it must have besides `type` and `sequence_number`."""

LIFECYCLE = (
    "response.created response.queued? (response.in_progress item*)?"
    "(response.completed | response.incomplete | response.failed | response.cancelled)"
)
"""The order of a whole stream, `item` standing for one event of an item: one terminal event, last, always."""

TERMINAL: Mapping[str, str] = {f"response.{status}": status for status in TERMINAL_STATUSES}
"""Terminal event -> the status that the response has in it."""

_TEXT_PART = (
    "content_part.added (output_text.delta | output_text.annotation.added)* output_text.done"
    " content_part.done"
)
_REFUSAL_PART = "content_part.added refusal.delta* refusal.done content_part.done"
_REASONING_PART = "content_part.added reasoning_text.delta* reasoning_text.done content_part.done"
_SUMMARY_PART = (
    "reasoning_summary_part.added reasoning_summary_text.delta* reasoning_summary_text.done"
    " reasoning_summary_part.done"
)

ITEMS: Mapping[str, str] = {
    "message": f"({_TEXT_PART} | {_REFUSAL_PART})*",
    "reasoning": f"({_REASONING_PART})* ({_SUMMARY_PART})*",
    "function_call": "function_call_arguments.delta* function_call_arguments.done",
    "custom_tool_call": "custom_tool_call_input.delta* custom_tool_call_input.done",
    "mcp_list_tools": "mcp_list_tools.in_progress (mcp_list_tools.completed | mcp_list_tools.failed)",
    "mcp_call": (
        "mcp_call.in_progress mcp_call_arguments.delta* mcp_call_arguments.done"
        " (mcp_call.completed | mcp_call.failed)"
    ),
    "web_search_call": "web_search_call.in_progress web_search_call.searching web_search_call.completed",
    "file_search_call": "file_search_call.in_progress file_search_call.searching file_search_call.completed",
    "code_interpreter_call": (
        "code_interpreter_call.in_progress code_interpreter_call_code.delta* code_interpreter_call_code.done"
        " code_interpreter_call.interpreting code_interpreter_call.completed"
    ),
    "image_generation_call": (
        "image_generation_call.in_progress image_generation_call.generating"
        " image_generation_call.partial_image* image_generation_call.completed"
    ),
    "shell_call": "(shell_call_command.added shell_call_command.delta* shell_call_command.done)*",
    "shell_call_output": "(shell_call_output_content.delta* shell_call_output_content.done)*",
}
"""Item type -> the order of its events between `output_item.added` and `output_item.done`; types that are not
listed have none between. Names are without their `response.`."""


def compile_grammar(grammar: str) -> re.Pattern[str]:
    """A grammar of this module as a pattern over event names, each followed by a space.

    Names in sequence; `*`, `?`, `|` and parentheses as in regular expressions.
    """
    names = re.sub(r"[a-z_.]+", lambda name: f"(?:{re.escape(name.group())}@)", grammar)
    return re.compile(re.sub(r"\s", "", names).replace("@", " "))


def in_order(grammar: str, names: Iterable[str]) -> bool:
    """Whether these event names, in this order, are a sentence of the grammar."""
    return compile_grammar(grammar).fullmatch("".join(f"{name} " for name in names)) is not None
