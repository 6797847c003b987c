"""Describes responses, conversations, models, the bodies of requests for completions, and what all families
share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter

from server.items import ASSISTANT_PART, ITEM_TYPES, SEALED, USER_PART
from server.schema import fields, formats, generate
from server.schema.chat import ChatRequest
from server.schema.completions import MAX_PROMPTS, CompletionRequest
from server.schema.description.parts import (
    BOOLEAN,
    INTEGER,
    METADATA,
    NUMBER,
    OBJECT,
    RETRY_AFTER,
    STOPPED,
    STRING,
    UNJUDGED,
    USAGE,
    VERDICT,
    listed,
    mapped,
    nullable,
    of,
    page_of,
    ref,
    with_others,
)
from server.schema.fields import FIELDS, SamplingFields
from server.schema.items import MAX_ITEMS
from server.schema.prompts import REFERENCE as PROMPT_REFERENCE
from server.schema.responses import CONTEXT_MANAGEMENT, INCLUDES, CreateResponse
from server.schema.search import SearchFields
from server.schema.tools import MAX_TOOLS, normalize_tool, search_tool
from server.shapes import Schema, or_null, schema_of, with_type

# ------------------------------------------------------------------------------------------------------------
# Requests

_BY_NAME: Mapping[str, Schema] = {
    "guided_json": {"anyOf": [STRING, OBJECT]},
    "guided_regex": STRING,
    "guided_choice": listed(STRING, minItems=1, maxItems=formats.MAX_CHOICES),
    "guided_grammar": STRING,
    "structured_outputs": OBJECT,
    "input": {"anyOf": [STRING, listed(ref("InputItem"), maxItems=MAX_ITEMS)]},
    "conversation": {"anyOf": [STRING, of({"id": STRING})]},
    "messages": listed(ref("ChatMessage"), minItems=1, maxItems=MAX_ITEMS),
    **dict.fromkeys(("responses.prompt", "input_tokens.prompt"), PROMPT_REFERENCE),
    "completions.prompt": {
        "anyOf": [
            STRING,
            listed(INTEGER, minItems=1),
            listed({"anyOf": [STRING, listed(INTEGER, minItems=1)]}, minItems=1, maxItems=MAX_PROMPTS),
        ]
    },
    "tools": listed(ref("Tool"), maxItems=MAX_TOOLS),
    "tool_choice": ref("ToolChoice"),
    "web_search_options": schema_of(search_tool),
    "include": listed({"enum": sorted(INCLUDES)}),
    "context_management": schema_of(CONTEXT_MANAGEMENT),
    "response_format": ref("ChatFormat"),
    "metadata": METADATA,
    "stop": {"anyOf": [STRING, listed(STRING, maxItems=fields.MAX_STOPS)]},
    "logit_bias": {**mapped({**NUMBER, "minimum": -100, "maximum": 100}), "maxProperties": fields.MAX_BIASES},
}
"""Fields of more than one form, and those that are checked by functions."""

_MEANINGS: Mapping[str, str] = {
    "await_tool_outputs": "With calls of the client's functions the response stays open until "
    "`POST /v1/responses/{id}/tool_outputs` brings their outputs.",
    "tool_timeout_s": "How long `await_tool_outputs` waits, in seconds.",
    "generate": "False: only the prompt is computed, for a next turn, and nothing is answered.",
    "chat_template_kwargs": "Arguments for the model's chat template.",
    "mm_processor_kwargs": "Arguments for the processor of the model's images.",
    "priority": "Its number in the queues: lower ones go first. Those below 0 are of the service tier "
    "priority, those above 0 of flex.",
    "cache_salt": "Prompts share cached prefixes with those of the same salt only.",
    "include_stop_str_in_output": "A stop string is the end of the text that it ends, and so is what a stop "
    "token shows.",
    "bad_words": "Texts that the answer never holds, wherever in a word.",
    "skip_special_tokens": "False writes special tokens out, and leaves reasoning and calls in the text.",
    "spaces_between_special_tokens": "Special tokens are written as they are, without spaces between them.",
    "prompt_logprobs": "The log probabilities of the prompt's tokens, with so many alternatives each.",
    "return_token_ids": "The reply has the ids of the prompt's tokens and of its own.",
    "return_tokens_as_token_ids": "Log probabilities write a token as `token_id:<id>`.",
    "truncate_prompt_tokens": "Only so many of the prompt's last tokens are read.",
    "add_special_tokens": "The tokenizer adds its special tokens, such as the beginning of a text.",
    "request_id": "What the id of the completion ends with; no other of yours may have it.",
    "echo": "The answer begins with the text of the last message, where that is an assistant's.",
    "documents": "Documents for chat templates that read them.",
    "chat_template": "A chat template in place of the model's own; needs trust_request_chat_template.",
    "guided_json": "The JSON Schema that the answer is held to.",
    "guided_regex": "The regular expression that the answer is held to.",
    "guided_choice": "The texts of which the answer is one.",
    "guided_grammar": "The grammar, in Lark's syntax, that the answer is held to.",
    "structured_outputs": "The same by the names `json`, `regex`, `choice`, `grammar`, `structural_tag` and "
    "`json_object`.",
    "max_tool_calls": "How many calls the server makes itself at most.",
    "include_reasoning": "False leaves the model's thought out of the answer.",
    "continue_final_message": "The answer goes on where the last message, an assistant's, stops.",
    "add_generation_prompt": "Whether the prompt ends with the beginning of an answer.",
    "seed": "Equal requests with equal seeds are answered alike.",
    "ignore_eos": "The answer goes on after the model's own end, to the limit of tokens.",
    "min_tokens": "Tokens before which the model's own end is not drawn.",
    "num_assistant_tokens": "Guessed tokens that one step checks; 0 turns speculation off.",
    "max_ngram_size": "Guesses come from where this many last tokens stood before.",
    "assistant_confidence_threshold": "Guesses that are less likely than this are not made.",
}
"""What extensions are for, where their names do not say it in the words of the field."""


def field_schema(model: type[BaseModel], name: str) -> Schema | None:
    """What a model says of one of its fields; None where it has no such field."""
    found = model.model_fields.get(name)
    if found is None:
        return None
    annotation: Any = found.annotation
    for constraint in found.metadata:
        annotation = Annotated[annotation, constraint]
    schema: Schema = TypeAdapter(annotation).json_schema()
    definitions = schema.pop("$defs", {})
    inlined: Schema = _inlined(schema, definitions)
    return inlined


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A pydantic schema without references, titles and defaults."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    kept = {key: each for key, each in schema.items() if key not in ("title", "default", "description")}
    if "properties" in kept:
        properties = {key: _inlined(each, definitions) for key, each in kept.pop("properties").items()}
        return {**_inlined(kept, definitions), "properties": properties}
    return {key: _inlined(each, definitions) for key, each in kept.items()}


def request_schema(api: str, model: type[BaseModel], *required: str) -> Schema:
    """The body of an API, from its row of the table of fields."""
    properties: Schema = {}
    for name, rule in FIELDS[api].items():
        if rule.accepts is not None:
            schema: Schema = {"enum": [None, *rule.accepts]}
        else:
            named = _BY_NAME.get(f"{api}.{name}") or _BY_NAME.get(name)
            found = named or field_schema(model, name) or field_schema(SamplingFields, name)
            schema = found or field_schema(SearchFields, name) or {}
        note = {
            "hint": "Taken, without effect: named in `x-antiphon-ignored`.",
            "refused": f"Not supported. {rule.because}".strip(),
            "extension": f"An extension. {_MEANINGS.get(name, '')}".strip(),
        }.get(rule.kind)
        taken = schema if name in required else or_null(schema)
        properties[name] = {**taken, "description": note} if note else taken
    body: Schema = {"type": "object", "properties": properties}
    return {**body, "required": [*required]} if required else body


_CONTENT: Schema = {"anyOf": [STRING, listed(OBJECT)]}
TOOL_OUTPUTS = listed(
    {"anyOf": [of({"output": _CONTENT}, {"call_id": STRING, "tool_call_id": STRING}), ref("Item")]},
    minItems=1,
)
"""The answers to calls, whole items or short forms."""
_CHAT_CALL = of(
    {"id": STRING, "type": {"enum": ["function", "custom"]}}, {"function": OBJECT, "custom": OBJECT}
)
_FORMAT_PARTS: Mapping[str, Schema] = {
    "name": STRING,
    "schema": OBJECT,
    "strict": BOOLEAN,
    "description": STRING,
}


def _items() -> Schema:
    """An item in its resource form, as it is stored and returned."""
    part = {"anyOf": [schema_of(USER_PART), schema_of(ASSISTANT_PART)]}
    kinds = []
    for name, row in ITEM_TYPES.items():
        schema = with_type(schema_of(row.shape), name)
        schema["properties"]["id"] = STRING
        schema["properties"]["metadata"] = {
            "type": ["object", "null"],
            "description": "An extension: what its client keeps with it.",
        }
        if row.has_private_half:
            schema["properties"][SEALED] = {
                **STRING,
                "description": "An extension, of what is not stored: what the server keeps of it, sealed.",
            }
        schema["properties"]["created_at"] = {
            **or_null(INTEGER),
            "description": "An extension: when it came into the conversation that shows it, in Unix seconds.",
        }
        if name == "message":
            schema["properties"]["content"] = listed(part)
        if row.adds:
            schema["properties"]["tools"] = {**listed(ref("Tool")), "maxItems": MAX_TOOLS}
        kinds.append(schema)
    return {"anyOf": kinds}


_TITLE: Schema = {**STRING, "maxLength": 512, "description": "An extension."}
_CONVERSATION_STATUS: Schema = {
    "enum": ["active", "archived"],
    "description": "An extension. An archived conversation takes no new items and turns.",
}

_FORKS: Mapping[str, Schema] = {
    "ForkConversation": of(
        {},
        {
            "after": {**STRING, "description": "The last item that is shared; without it, all are."},
            "metadata": {**METADATA, "description": "Without it, that of what is forked."},
        },
    ),
    "ForkResponse": of(
        {},
        {
            "after": {
                **STRING,
                "description": "The item of its input or output that the fork ends with; without it, "
                "it has all of them.",
            },
            "starting_after": {
                **INTEGER,
                "minimum": -1,
                "description": "Instead of `after`: the number of an event. The fork has the output "
                "items that were done by then.",
            },
            "metadata": {**METADATA, "description": "Without it, that of what is forked."},
        },
    ),
}


def _generation() -> Schema:
    """The body of POST /inference/v1/generate, whose fields are those of a completion in two groups."""
    fields = request_schema("completions", CompletionRequest)["properties"]
    params = {name: fields[name] for name in generate.PARAMS}
    return of(
        {"token_ids": listed(INTEGER, minItems=1)},
        {
            **{name: fields[name] for name in generate.FIELDS if name in fields},
            "sampling_params": {"type": "object", "properties": params},
        },
    )


def _requests() -> dict[str, Schema]:
    """Bodies of requests."""
    return {
        "CreateResponse": request_schema("responses", CreateResponse),
        "CountInputTokens": request_schema("input_tokens", CreateResponse),
        "CompactResponse": request_schema("compact", CreateResponse),
        "CreateChatCompletion": request_schema("chat", ChatRequest, "messages"),
        "CreateCompletion": request_schema("completions", CompletionRequest, "prompt"),
        "CreateGeneration": _generation(),
        "ToolOutputs": of(
            {},
            {
                "tool_outputs": TOOL_OUTPUTS,
                "type": STRING,
                "call_id": STRING,
                "tool_call_id": STRING,
                "output": _CONTENT,
                "stream": BOOLEAN,
            },
        ),
        "CreateConversation": of(
            {},
            {"items": listed(ref("InputItem"), maxItems=20), "metadata": METADATA, "title": _TITLE},
        ),
        "UpdateConversation": of({}, {"metadata": METADATA, "title": _TITLE, "status": _CONVERSATION_STATUS}),
        "UpdateChatCompletion": of({"metadata": or_null(METADATA)}),
        **{name: {**fork, "additionalProperties": False} for name, fork in _FORKS.items()},
        "AddItems": of({"items": listed(ref("InputItem"), maxItems=20)}),
        "Tokenize": of(
            {},
            {
                **{
                    name: OBJECT
                    for name in ("chat_template_kwargs", "mm_processor_kwargs", "structured_outputs")
                },
                "model": STRING,
                "prompt": STRING,
                "add_special_tokens": BOOLEAN,
                "return_token_strs": BOOLEAN,
                "messages": _BY_NAME["messages"],
                "tools": _BY_NAME["tools"],
                "tool_choice": ref("ToolChoice"),
            },
        ),
        "Detokenize": of({"tokens": listed(INTEGER)}, {"model": STRING}),
        "Nothing": OBJECT,
    }


def _shared() -> dict[str, Schema]:
    """What bodies of requests are made of, and replies too."""
    return {
        "Tool": {"anyOf": [*map(with_others, schema_of(normalize_tool)["anyOf"])]},
        "ToolChoice": {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                of({"type": STRING}, {"name": STRING, "namespace": STRING, "server_label": STRING}),
                of(
                    {
                        "type": {"const": "allowed_tools"},
                        "mode": {"enum": ["auto", "required"]},
                        "tools": listed(OBJECT),
                    }
                ),
            ]
        },
        "TextFormat": {
            "anyOf": [
                of({"type": {"enum": ["text", "json_object"]}}),
                of(
                    {"type": {"const": "json_schema"}, "name": STRING, "schema": OBJECT, "strict": BOOLEAN},
                    {"description": STRING},
                ),
                with_others(of({"type": {"const": "structural_tag"}})),
            ]
        },
        "ChatFormat": {
            "anyOf": [
                of({"type": {"enum": ["text", "json_object", "structural_tag"]}}),
                of({"type": {"const": "json_schema"}, "json_schema": of({"name": STRING}, _FORMAT_PARTS)}),
            ]
        },
        "ChatMessage": of(
            {"role": {"enum": ["developer", "system", "user", "assistant", "tool"]}},
            {
                "content": _CONTENT,
                "refusal": STRING,
                "reasoning": STRING,
                "reasoning_content": STRING,
                "tool_calls": listed(_CHAT_CALL),
                "tool_call_id": STRING,
                "server_tool_calls": {
                    **listed(ref("Item")),
                    "description": "An extension, of an assistant: the calls that the server has made "
                    "itself, as items of a response.",
                },
                "file_citations": {
                    **listed(OBJECT),
                    "description": "An extension, of an assistant: what it cites of files, as the "
                    "annotations of a response.",
                },
            },
        ),
        "InputItem": {
            "description": "An item, or one of its short forms.",
            "anyOf": [
                of(
                    {"role": {"enum": ["user", "assistant", "system", "developer"]}, "content": _CONTENT},
                    {"type": {"const": "message"}},
                ),
                of({"id": STRING}, {"type": {"const": "item_reference"}}),
                of({"type": {"const": "function"}, "function": OBJECT}),
                ref("Item"),
            ],
        },
        "Item": _items(),
    }


# ------------------------------------------------------------------------------------------------------------
# Replies

_STORELESS = of({"type": {"const": "file_search"}, "vector_store_ids": listed(STRING, maxItems=0)})
STATUSES = ("queued", "in_progress", "completed", "incomplete", "failed", "cancelled")


_REPLIES: Mapping[str, Schema] = {
    "Error": of(
        {
            "error": of(
                {"message": STRING, "type": STRING, "param": or_null(STRING), "code": or_null(STRING)},
                {"retry_after": RETRY_AFTER},
            )
        }
    ),
    "Response": of(
        {
            "id": STRING,
            "object": {"const": "response"},
            "created_at": INTEGER,
            "status": {"enum": [*STATUSES]},
            "model": STRING,
            "output": listed(ref("Item")),
            "error": or_null(of({"code": STRING, "message": STRING}, {"retry_after": RETRY_AFTER})),
            "incomplete_details": or_null(of({"reason": STRING}, {"message": STOPPED})),
            "usage": or_null(USAGE),
            "background": BOOLEAN,
            "conversation": or_null(of({"id": STRING})),
            "instructions": or_null({"anyOf": [STRING, listed(ref("Item"))]}),
            "max_output_tokens": or_null(INTEGER),
            "max_tool_calls": or_null(INTEGER),
            "metadata": METADATA,
            "parallel_tool_calls": BOOLEAN,
            "previous_response_id": or_null(STRING),
            "reasoning": of(dict.fromkeys(("effort", "summary", "context"), or_null(STRING))),
            "service_tier": STRING,
            "store": BOOLEAN,
            "temperature": NUMBER,
            "text": of({"format": ref("TextFormat"), "verbosity": STRING}),
            "tool_choice": ref("ToolChoice"),
            "tools": listed(ref("Tool")),
            "top_logprobs": INTEGER,
            "top_p": NUMBER,
            "truncation": {"enum": ["auto", "disabled"]},
            **dict.fromkeys(("frequency_penalty", "presence_penalty"), NUMBER),
            **nullable(
                {
                    "completed_at": INTEGER,
                    **dict.fromkeys(
                        ("prompt_cache_key", "prompt_cache_retention", "safety_identifier"), STRING
                    ),
                }
            ),
        },
        {
            "moderation": of({half: {"anyOf": [VERDICT, UNJUDGED]} for half in ("input", "output")}),
            **{
                name: {**listed(OBJECT), "description": "An extension, with `enable_response_messages`."}
                for name in ("input_messages", "output_messages")
            },
            "prompt": ref("ResponsePrompt"),
            "user": STRING,
            "attempt": {
                **INTEGER,
                "description": "An extension, in flight: how often an engine was given it.",
            },
            "restarts": {
                **INTEGER,
                "description": "An extension, also after the end: how often the server ended while it was "
                "being made, so that it went on in another process; absent where that never happened.",
            },
            "cancel_reason": {
                "enum": ["unread", "next_turn"],
                "description": "An extension, where the server cancelled it by itself: nobody read it for as "
                "long as such a response goes on, or the next turn of its conversation began meanwhile.",
            },
            "queue_position": {
                **INTEGER,
                "description": "An extension, while queued: its turn; 1 is the next to begin.",
            },
            "forked_from": {
                **of({"response_id": STRING, "after": or_null(STRING)}),
                "description": "An extension, of a fork: the response whose items it has, and the item that "
                "it ends with.",
            },
            "pending_tool_calls": {
                **listed(
                    of({"name": STRING, "type": STRING}, {"call_id": STRING, "approval_request_id": STRING})
                ),
                "description": "An extension, while it waits: the calls whose outputs or approvals it is "
                "to be given; `type` is that of their items in the output.",
            },
            "tool_timeout_at": {
                **INTEGER,
                "description": "An extension, while it waits: when it fails unless it is given them, in Unix "
                "seconds.",
            },
        },
    ),
    "Conversation": of(
        {
            **{"id": STRING, "object": {"const": "conversation"}, "created_at": INTEGER},
            **{"updated_at": INTEGER, "status": _CONVERSATION_STATUS, "metadata": METADATA},
        },
        {
            "title": _TITLE,
            "active_response_id": {
                **STRING,
                "description": "An extension, while a turn is at work on it: the response that holds it.",
            },
            "forked_from": {
                **of({"conversation_id": STRING, "after": or_null(STRING)}),
                "description": "An extension, of a fork: the conversation that it begins as, and the last "
                "item that they share.",
            },
        },
    ),
    "SocketTicket": of(
        {"object": {"const": "ws_ticket"}, "ticket": STRING, "expires_at": INTEGER, "protocol": STRING}
    ),
    "Deleted": of({"id": STRING, "object": STRING, "deleted": {"const": True}}),
    "Model": of(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "parent": or_null(STRING),
        },
        {
            "max_model_len": {
                **or_null(INTEGER),
                "description": "Tokens of prompt and answer together; null where it was never loaded, and "
                "of a model for speech.",
            },
            "input_modalities": listed(STRING),
            "state": {"enum": ["unloaded", "waiting", "loading", "loaded", "failed"]},
            "deprecation_date": {**STRING, "format": "date"},
            "used_for": {"enum": ["embedding", "rerank", "classification", "speech"]},
            "architecture": STRING,
            "engine": STRING,
            "dimensions": INTEGER,
            "labels": listed(STRING),
            "languages": listed(STRING),
            "window_seconds": NUMBER,
            "prompts": mapped(STRING),
            "default_prompt": STRING,
            "pooling": of(
                {"modes": listed(STRING), "source": STRING, "attention": STRING},
                {"normalized": BOOLEAN, "activation": STRING},
            ),
        },
    ),
    "OfferedTools": of(
        {
            "object": {"const": "list"},
            "owner": {**STRING, "description": "Whose key the request came with."},
            "data": listed(
                of(
                    {
                        "object": {"const": "tool"},
                        "tool": {
                            "anyOf": [ref("Tool"), _STORELESS],
                            "description": "As a request would write it; `file_search` lacks its stores.",
                        },
                        "available": BOOLEAN,
                        "reason": or_null(STRING),
                    }
                )
            ),
        }
    ),
    "Models": of({"object": {"const": "list"}, "data": listed(ref("Model"))}),
    "Items": page_of(ref("Item")),
    "Conversations": page_of(ref("Conversation")),
    "Responses": page_of(ref("Response")),
    "Compaction": of(
        {
            "id": STRING,
            "object": {"const": "response.compaction"},
            "output": listed(ref("Item")),
            "created_at": INTEGER,
            "usage": USAGE,
        }
    ),
    "InputTokens": of({"object": {"const": "response.input_tokens"}, "input_tokens": INTEGER}),
    "Tokens": of(
        {"count": INTEGER, "max_model_len": INTEGER, "tokens": listed(INTEGER)},
        {"token_strs": listed(STRING)},
    ),
    "Text": of({"prompt": STRING}),
    "Status": of({"status": STRING}),
    "Load": of({"server_load": INTEGER, "running": INTEGER, "waiting": INTEGER, "kv_cache_usage": NUMBER}),
    "Ready": of({"status": {"const": "ready"}, "models": listed(STRING)}),
    "Version": of(
        {"version": STRING}, {"sandbox": {**STRING, "description": "What runs code, or why nothing does."}}
    ),
}


def response_components() -> Mapping[str, Schema]:
    """The schemas of these families, by name."""
    return {**_requests(), **_shared(), **_REPLIES}
