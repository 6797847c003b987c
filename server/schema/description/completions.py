"""Describes the replies of chat completions, text completions and generations, whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping

from server.items import ANNOTATION
from server.schema.description.parts import (
    INTEGER,
    METADATA,
    NUMBER,
    OBFUSCATION,
    OBJECT,
    STRING,
    UNJUDGED,
    VERDICT,
    listed,
    mapped,
    nullable,
    of,
    page_of,
    ref,
    with_others,
)
from server.shapes import Schema, or_null, schema_of

_USAGE = of(
    {
        "prompt_tokens": INTEGER,
        "completion_tokens": INTEGER,
        "total_tokens": INTEGER,
        "prompt_tokens_details": of(dict.fromkeys(("cached_tokens", "cache_write_tokens"), INTEGER)),
        "completion_tokens_details": of({"reasoning_tokens": INTEGER}),
    }
)
_FINISH = or_null({"enum": ["stop", "length", "tool_calls", "content_filter"]})
_HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
_NULL: Schema = {"type": "null"}

# ------------------------------------------------------------------------------------------------------------
# Tokens

_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": or_null(listed(INTEGER))}
_TOKENS = listed(of({**_TOKEN, "top_logprobs": listed(of(_TOKEN))}))
_TEXT_LOGPROBS = of(
    {
        "tokens": listed(STRING),
        "token_logprobs": listed(or_null(NUMBER)),
        "top_logprobs": listed(or_null(mapped(NUMBER))),
        "text_offset": listed(INTEGER),
    }
)
_SCORE = of({"logprob": NUMBER, "rank": or_null(INTEGER), "decoded_token": STRING})
_SCORES = listed(or_null(mapped(_SCORE)))
_STOP: Schema = {
    "anyOf": [STRING, INTEGER],
    "description": "An extension: the stop string, or the id of the stop token, that ended it.",
}
_IDS = listed(INTEGER)
_PROMPT: Mapping[str, Schema] = {"prompt_token_ids": _IDS, "prompt_logprobs": _SCORES}

# ------------------------------------------------------------------------------------------------------------
# Messages

_CITED = of({"url": STRING, "title": STRING, "start_index": INTEGER, "end_index": INTEGER})
_NOTES: Mapping[str, Schema] = {
    "annotations": listed(of({"type": {"const": "url_citation"}, "url_citation": _CITED})),
    "file_citations": {
        **listed(schema_of(ANNOTATION)),
        "description": "An extension: what it cites of files, as the annotations of a response.",
    },
}
_THOUGHT = {"reasoning": STRING, "reasoning_content": STRING}
_CALL: Schema = {
    "anyOf": [
        of(
            {
                "id": STRING,
                "type": {"const": "function"},
                "function": of({"name": STRING, "arguments": STRING}),
            }
        ),
        of({"id": STRING, "type": {"const": "custom"}, "custom": of({"name": STRING, "input": STRING})}),
    ]
}
_CALL_DELTA = of(
    {"index": INTEGER},
    {
        "id": STRING,
        "type": {"enum": ["function", "custom"]},
        "function": of({"arguments": STRING}, {"name": STRING}),
        "custom": of({"input": STRING}, {"name": STRING}),
    },
)
_MADE = "An extension: calls that the server has made itself, as items of a response"
_MESSAGE = of(
    {"role": STRING, "content": or_null(STRING), "refusal": _NULL, "annotations": _NOTES["annotations"]},
    {
        **_THOUGHT,
        "tool_calls": listed(_CALL),
        "server_tool_calls": {**listed(ref("Item")), "description": f"{_MADE}."},
        "file_citations": _NOTES["file_citations"],
    },
)
_DELTA = of(
    {},
    {
        "role": STRING,
        "content": STRING,
        **_THOUGHT,
        "tool_calls": listed(_CALL_DELTA),
        "server_tool_calls": {
            **listed(with_others(of({"index": INTEGER, "type": STRING}))),
            "description": f"{_MADE}, each with its place among them.",
        },
        **_NOTES,
    },
)
_SAID_TOKENS = or_null(of({"content": _TOKENS, "refusal": _NULL}))

# ------------------------------------------------------------------------------------------------------------
# Replies

_VERDICTS: Schema = {
    "anyOf": [
        of({"type": {"const": "moderation_results"}, "model": STRING, "results": listed(VERDICT)}),
        UNJUDGED,
    ]
}


def completion_components() -> Mapping[str, Schema]:
    """The schemas of these families, by name."""
    choice = {"index": INTEGER, "finish_reason": _FINISH}
    ended = {"stop_reason": _STOP, "token_ids": _IDS}
    streamed = {"usage": _USAGE, "obfuscation": OBFUSCATION}
    return {
        "Verdicts": {
            "description": "What moderation found, where it was asked for.",
            **of({"input": _VERDICTS, "output": _VERDICTS}),
        },
        "ChatCompletion": of(
            {
                **_HEAD,
                "object": {"const": "chat.completion"},
                "service_tier": STRING,
                "choices": listed(of({**choice, "message": _MESSAGE, "logprobs": _SAID_TOKENS}, ended)),
                "usage": _USAGE,
            },
            {"metadata": METADATA, **_PROMPT, "moderation": ref("Verdicts")},
        ),
        "ChatCompletionChunk": of(
            {
                **_HEAD,
                "object": {"const": "chat.completion.chunk"},
                "service_tier": STRING,
                "choices": listed(of({**choice, "delta": _DELTA, "logprobs": _SAID_TOKENS}, ended)),
            },
            {**streamed, **_PROMPT, "moderation": ref("Verdicts")},
        ),
        "ChatCompletions": page_of(ref("ChatCompletion")),
        "ChatCompletionMessages": page_of(
            with_others(
                of(
                    {
                        "id": STRING,
                        "role": STRING,
                        **nullable({"content": STRING, "refusal": STRING, "content_parts": listed(OBJECT)}),
                    }
                )
            )
        ),
        "Completion": of(
            {
                **_HEAD,
                "object": {"const": "text_completion"},
                "choices": listed(
                    of({**choice, "text": STRING, "logprobs": or_null(_TEXT_LOGPROBS)}, {**ended, **_PROMPT})
                ),
            },
            {**streamed, "service_tier": STRING},
        ),
        "Generation": of(
            {
                **_HEAD,
                "object": {"enum": ["generation", "generation.chunk"]},
                "request_id": STRING,
                "choices": listed(
                    of(
                        {**choice, "token_ids": _IDS, "logprobs": or_null(of({"content": _TOKENS}))},
                        {"stop_reason": _STOP},
                    )
                ),
            },
            {**streamed, "service_tier": STRING, "prompt_logprobs": _SCORES},
        ),
    }
