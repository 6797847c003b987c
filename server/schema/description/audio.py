"""Describes forms with sound, and what is heard in them."""

from __future__ import annotations

from collections.abc import Mapping

from server.audio_fields import TRANSCRIPTION, TRANSLATION, form_schema
from server.schema.description.parts import INTEGER, NUMBER, STRING, listed, of
from server.shapes import Schema

_DURATION = of({"type": {"const": "duration"}, "seconds": NUMBER})
_TOKENS = of(
    {
        "type": {"const": "tokens"},
        **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), INTEGER),
        "input_token_details": of({"text_tokens": INTEGER, "audio_tokens": INTEGER}),
    }
)
_LOGPROBS = listed(of({"token": STRING, "logprob": NUMBER, "bytes": listed(INTEGER)}))
_SEGMENT = of(
    {
        **dict.fromkeys(("id", "seek"), INTEGER),
        **dict.fromkeys(("start", "end", "temperature"), NUMBER),
        "text": STRING,
        "tokens": listed(INTEGER),
        **dict.fromkeys(("avg_logprob", "compression_ratio", "no_speech_prob"), NUMBER),
    }
)
_WORD = of({"word": STRING, "start": NUMBER, "end": NUMBER})


def _heard(task: str, *, usage: bool) -> Schema:
    """A reply in JSON: the text alone, or everything."""
    told: dict[str, Schema] = {"usage": _DURATION} if usage else {}
    short = of({"text": STRING}, {**told, "logprobs": _LOGPROBS} if usage else {})
    long = of(
        {"task": {"const": task}, "language": STRING, "duration": NUMBER, "text": STRING},
        {"segments": listed(_SEGMENT), "words": listed(_WORD), **told},
    )
    return {"anyOf": [long, short]}


def audio_components() -> Mapping[str, Schema]:
    """The schemas of this family, by name."""
    return {
        "CreateTranscription": form_schema(TRANSCRIPTION),
        "CreateTranslation": form_schema(TRANSLATION),
        "Transcription": _heard("transcribe", usage=True),
        "Translation": _heard("translate", usage=False),
        "TranscriptEvent": {
            "anyOf": [
                of({"type": {"const": "transcript.text.delta"}, "delta": STRING}, {"logprobs": _LOGPROBS}),
                of(
                    {"type": {"const": "transcript.text.done"}, "text": STRING, "usage": _TOKENS},
                    {"logprobs": _LOGPROBS},
                ),
            ]
        },
    }
