"""What a form with sound asks for: a transcription, or a translation into English."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine import SpeechInfo, Window
from server.audio_fields import SPEAKERS, TRANSCRIPTION, TRANSLATION, read_fields
from server.ignored import ignore
from server.schema import refuse
from server.speech.languages import NAMES, language_code

Task = Literal["transcribe", "translate"]

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Tried one after the other where a request leaves the temperature at 0, as the official API has it: the next
one for a window whose text would be improbable or repeat itself."""


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A form, read and checked. language: as the request says it; None: to be recognized."""

    task: Task
    model: str | None
    language: str | None
    prompt: str
    format: str
    temperature: float
    words: bool
    segments: bool
    logprobs: bool
    stream: bool

    def window(self, info: SpeechInfo) -> Window:
        """How each window is to be read by a model. ApiError 400 for a language that the model does not know,
        or a task that it cannot do."""
        if self.task == "translate" and not info.languages:
            message = f"The model '{info.name}' knows English alone, and cannot translate."
            refuse("model", message, "unsupported_model")
        return Window(
            b"",
            task=self.task,
            language=self._language(info),
            prompt=self.prompt,
            temperatures=(self.temperature,) if self.temperature else TEMPERATURES,
            words=self.words,
        )

    def _language(self, info: SpeechInfo) -> str | None:
        if self.language is None:
            return None
        code = language_code(self.language)
        if code not in (info.languages or ("en",)):
            known = ", ".join(info.languages or ("en",))
            message = (
                f"Invalid 'language': the model '{info.name}' knows no '{self.language}'. It knows: {known}."
            )
            refuse("language", message)
        return code


def parse_speech(given: Mapping[str, tuple[str, ...]], task: Task) -> SpeechRequest:
    """The fields of a form, its file left out. Raises ApiError 400."""
    for name in given:
        if name.partition("[")[0] in SPEAKERS and task == "transcribe":
            refuse(name, "Speakers are not told apart by the models of this server.", "unsupported_parameter")
    if given.get("response_format") == ("diarized_json",):
        message = "Invalid 'response_format': speakers are not told apart by the models of this server."
        refuse("response_format", message, "unsupported_parameter")
    fields, unknown = read_fields(given, TRANSCRIPTION if task == "transcribe" else TRANSLATION)
    for name in unknown:
        ignore(name)
    form = fields.get("response_format", "json")
    granularities = fields.get("timestamp_granularities")
    if granularities and form != "verbose_json":
        message = "'timestamp_granularities' needs the response_format 'verbose_json'."
        refuse("timestamp_granularities", message)
    logprobs, stream = "logprobs" in fields.get("include", ()), fields.get("stream", False)
    if logprobs and form != "json":
        refuse("include", "'logprobs' needs the response_format 'json'.")
    if stream and form not in ("json", "text"):
        refuse(
            "stream", f"What is streamed are events with text: the response_format '{form}' has no stream."
        )
    if isinstance(fields.get("chunking_strategy"), dict):
        ignore("chunking_strategy")  # windows end where the model says that a sentence does
    prompt = ", ".join([*fields.get("keywords", ()), *([fields["prompt"]] if fields.get("prompt") else [])])
    return SpeechRequest(
        task=task,
        model=fields.get("model"),
        language=_said(fields.get("language"), fields.get("languages", ())),
        prompt=prompt,
        format=form,
        temperature=float(fields.get("temperature", 0)),
        words="word" in (granularities or ()),
        segments="segment" in (granularities or ("segment",)),
        logprobs=logprobs,
        stream=stream,
    )


def _said(language: str | None, languages: list[str] | tuple[str, ...]) -> str | None:
    """The language that is spoken, where one is named. Of several the model is not told: it recognizes
    one."""
    if language is not None or not languages:
        return language
    if len(languages) == 1:
        return languages[0]
    ignore("languages")
    return None


def language_name(code: str) -> str:
    """A language as replies name it."""
    return NAMES.get(code, code)
