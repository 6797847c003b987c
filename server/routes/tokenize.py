"""/tokenize and /detokenize, as other open servers have them.

Bodies: `{"model", "prompt"}` or `{"model", "messages", "tools", ...}` -> `{"count", "max_model_len",
"tokens"}`; `{"model", "tokens"}` -> `{"prompt"}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.http import context, json_reply, owner, read_as
from server.model_registry import ServedModel
from server.prompting import check, words_of_field
from server.routes.chosen_model import chosen_model
from server.routes.documented import documented
from server.schema import ChatRequest, image_paths, missing, mistyped, parse_chat, refuse
from server.shapes import name_others
from server.stateless import offer_of, rendered
from server.threads import aside, in_large_request

router = APIRouter(tags=["Tokens"])

TEXT_FIELDS = ("model", "prompt", "add_special_tokens", "return_token_strs")
"""What is read of a request for the tokens of a text."""

PROMPT_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("reasoning_effort", "chat_template_kwargs", "mm_processor_kwargs"),
    *("continue_final_message", "add_generation_prompt"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
)
"""What is read, beside `return_token_strs`, of a request for the tokens of messages: the fields of a chat
completion that have a part in its prompt."""


@router.post("/tokenize", **documented("Tokens", "models.read", body="Tokenize"))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of messages through the chat template, exactly as a generation would see
    them."""
    unsupported = context(request).config.unsupported_tools
    parse = partial(parse_chat, unsupported_tools=unsupported, on="tokens")
    body, asked = await read_as(request, partial(_read, parse))
    model = await _model(request, body)
    if asked is not None:
        offered = await aside(in_large_request(), offer_of, asked)
        await check(offered, model, asked.tools, asked.shape_param, owner(request))
        if images := image_paths(asked.messages):
            runs = context(request).runs
            asked.items[:] = await runs.intake.read_images(owner(request), asked.items, model, paths=images)
        ids = (await rendered(asked, model, offered, scope=owner(request))).ids
    else:
        prompt = body.get("prompt")
        if prompt is None:
            missing("prompt")
        if not isinstance(prompt, str):
            mistyped("prompt", "a string", prompt)
        special = _flag(body, "add_special_tokens", True)
        with words_of_field("prompt"):
            ids = await model.engine.tokenize(prompt, add_special_tokens=special, owner=owner(request))
    shown = _flag(body, "return_token_strs", False)
    return json_reply(await aside(in_large_request(), _reply, model, ids, shown))


@router.post("/detokenize", **documented("Text", "models.read", body="Detokenize"))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""

    def read(body: Mapping[str, Any]) -> Mapping[str, Any]:
        name_others(body, ("model", "tokens"))
        return body

    body = await read_as(request, read)
    model = await _model(request, body)
    tokens = _tokens(body.get("tokens"), model)
    text = await model.engine.detokenize(tokens, owner=owner(request))
    return json_reply(orjson.dumps({"prompt": text}))


def _reply(model: ServedModel, ids: Sequence[int], shown: bool) -> bytes:
    """The body of a reply of token ids. shown: with their texts."""
    reply: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": model.info.max_model_len,
        "tokens": [*ids],
    }
    if shown:
        reply["token_strs"] = [model.engine.token_text(token_id) for token_id in ids]
    return orjson.dumps(reply)


def _read(
    parse: Callable[[Mapping[str, Any]], ChatRequest], body: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ChatRequest | None]:
    """A body, and the chat completion with these fields whose prompt it asks for."""
    if body.get("messages") is None:
        name_others(body, TEXT_FIELDS)
        return body, None
    name_others(body, (*PROMPT_FIELDS, "return_token_strs"))
    return body, parse({name: body[name] for name in PROMPT_FIELDS if name in body})


def _tokens(value: Any, model: ServedModel) -> list[int]:
    """Token ids of a model, checked."""
    if value is None:
        missing("tokens")
    if not isinstance(value, list):
        mistyped("tokens", "an array", value)
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < model.info.vocab_size:
            refuse(f"tokens[{index}]", f"Invalid 'tokens[{index}]': not a token id of this model.")
    return value


async def _model(request: Request, body: Mapping[str, Any]) -> ServedModel:
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        mistyped("model", "a string", name)
    return await chosen_model(request, name)


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        mistyped(name, "a boolean", value)
    return value
