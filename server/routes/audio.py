"""POST /v1/audio/transcriptions and /v1/audio/translations. A client that leaves ends its work."""

from __future__ import annotations

from contextlib import ExitStack

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.http import EventStream, context, json_reply, limited, principal, while_connected
from server.http.contents import load_form
from server.routes.chosen_model import chosen_speech
from server.routes.documented import documented
from server.speech import SpeechWork, answer, parse_speech
from server.stateless import begin

router = APIRouter(prefix="/v1/audio", tags=["Audio"])

FORM = "multipart/form-data"
TEXTS = ("text/plain", "text/vtt")


DECODING_S = 5.0
"""How long the headers of a stream wait for its first event: most files that cannot be decoded are known by
then, and are refused with a status of their own."""


@router.post(
    "/transcriptions",
    **documented(
        "Transcription",
        "audio.write",
        body="CreateTranscription",
        body_type=FORM,
        stream="TranscriptEvent",
        texts=TEXTS,
    ),
)
async def create_transcription(request: Request) -> Response:
    """What is said in a file of sound, in its own language; or (`stream`) the text of each window once it is
    heard."""
    return await _answer(request, "transcribe")


@router.post(
    "/translations",
    **documented("Translation", "audio.write", body="CreateTranslation", body_type=FORM, texts=TEXTS),
)
async def create_translation(request: Request) -> Response:
    """What is said in a file of sound, in English."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    here = context(request)
    form = await load_form(request)
    asked = parse_speech(form.all_fields, "translate" if task == "translate" else "transcribe")
    received = form.file("file")
    served = await chosen_speech(request, asked.model)

    async def file() -> bytes:
        return b"".join([piece async for piece in here.storage.blobs.open(received.blob.digest)])

    work = SpeechWork(
        served,
        asked,
        received.filename,
        file,
        principal(request),
        limited(request, served.name),
        here.limiter,
        here.meter,
        here.config,
    )
    headers = here.models.headers(served.name)
    with ExitStack() as stack:
        if asked.stream:
            frames = work.frames(stack)
            first = await begin(frames, DECODING_S)
            return EventStream(first, headers=headers, on_close=stack.pop_all().close)
        heard = await while_connected(request, work.whole(stack))
        body, media_type = answer(heard, asked)
        if isinstance(body, str):
            return Response(body, headers=headers, media_type=media_type)
        return json_reply(orjson.dumps(body), headers)
