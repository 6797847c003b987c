"""Transcriptions and translations, on a server with a tiny random model for speech."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError

from engine import Window
from server.process import lifecycle
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.speech_checkpoints import make_whisper, sound_file, tone
from tests.support.usage import used
from tests.support.wire import validate, validate_error

GUIDE = Path(__file__).parents[3] / "docs" / "observability.md"

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/audio/transcriptions"
SHORT, LONG = sound_file(3.0), sound_file(65.0, seed=3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("speech")
    async with live_app(
        folder / "data",
        speech_model=(
            f"whisper-1={make_whisper(folder / 'whisper')}",
            str(make_whisper(folder / "english", several=False)),
        ),
        api_key=("sk-one",),
        owner_limit=("tokens_per_day=1000000",),
        num_threads=1,
        max_audio_s=70.0,
        max_audio_bytes=3_000_000,
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(server, authorization="Bearer sk-one") as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sdk(server: Running) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="sk-one", max_retries=0) as sdk:
        yield sdk


async def _post(
    client: httpx.AsyncClient, path: str = PATH, file: bytes = SHORT, **fields: Any
) -> httpx.Response:
    fields = {"model": "whisper-1", "temperature": "0.5", "language": "en", **fields}
    if "translations" in path:
        fields.pop("language")
    return await client.post(path, data=fields, files={"file": ("speech.wav", file, "audio/wav")})


async def _expected(server: Running, wave: Any, **asked: Any) -> str:
    """What the engine itself hears in a short sound."""
    engine = (await server.context.models.load_speech("whisper-1")).engine
    text = await engine.read(Window(wave.tobytes(), temperatures=(0.5,), **asked))
    return "".join(segment.text for segment in text.segments).strip()


async def test_the_official_sdk_gets_a_text(server: Running, sdk: AsyncOpenAI) -> None:
    found = await sdk.audio.transcriptions.create(
        file=("a.wav", SHORT), model="whisper-1", language="en", temperature=0.5, prompt="the ant"
    )
    assert found.text == await _expected(server, tone(3.0), language="en", prompt="the ant")
    assert found.usage is not None and found.usage.type == "duration" and found.usage.seconds == 3.0


async def test_the_official_sdk_gets_everything_that_there_is(
    sdk: AsyncOpenAI, client: httpx.AsyncClient
) -> None:
    found = await sdk.audio.transcriptions.create(
        file=("a.wav", LONG),
        model="whisper-1",
        language="de",
        temperature=0.5,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert (found.language, found.duration) == ("german", 65.0)
    assert found.segments and found.words
    assert {segment.seek for segment in found.segments} > {0}
    starts = [segment.start for segment in found.segments]
    assert starts == sorted(starts) and starts[-1] <= 65.0
    assert all(segment.start <= segment.end <= 65.0 for segment in found.segments)
    assert "".join(segment.text for segment in found.segments).strip() == found.text
    raw = (await _post(client, response_format="verbose_json")).json()
    validate("CreateTranscriptionResponseVerboseJson", raw)
    assert "words" not in raw
    only_words = {"response_format": "verbose_json", "timestamp_granularities[]": ["word"]}
    raw = (await _post(client, **only_words)).json()
    assert raw["words"] and "segments" not in raw


async def test_the_official_sdk_reads_a_stream(sdk: AsyncOpenAI) -> None:
    asked: Any = {"file": ("a.wav", LONG), "model": "whisper-1", "language": "en", "temperature": 0.5}
    whole = await sdk.audio.transcriptions.create(**asked)
    events = []
    async with await sdk.audio.transcriptions.create(**asked, stream=True, include=["logprobs"]) as stream:
        async for event in stream:
            events.append(event)
    *deltas, done = events
    assert [event.type for event in deltas] == ["transcript.text.delta"] * len(deltas)
    assert len(deltas) >= 3
    assert done.type == "transcript.text.done" and done.text == whole.text
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta") == whole.text
    assert done.usage is not None and done.usage.input_token_details is not None
    assert done.usage.input_token_details.audio_tokens == 65 * 50
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert done.logprobs and all(each.logprob <= 0 for each in done.logprobs if each.logprob is not None)
    assert (
        bytes(int(byte) for each in done.logprobs for byte in each.bytes or ()).decode().strip() == done.text
    )
    validate("TranscriptTextDoneEvent", done.model_dump(exclude_unset=True))


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # so the SDK calls this endpoint
async def test_the_official_sdk_gets_a_translation(server: Running, sdk: AsyncOpenAI) -> None:
    found = await sdk.audio.translations.create(file=("a.wav", SHORT), model="whisper-1", temperature=0.5)
    assert found.text == await _expected(server, tone(3.0), task="translate")
    long = await sdk.audio.translations.create(
        file=("a.wav", SHORT), model="whisper-1", temperature=0.5, response_format="verbose_json"
    )
    assert long.language == "english" and long.segments
    with pytest.raises(BadRequestError, match="knows English alone"):
        await sdk.audio.translations.create(file=("a.wav", SHORT), model="english")


async def test_texts_and_subtitles(client: httpx.AsyncClient, sdk: AsyncOpenAI) -> None:
    verbose = (await _post(client, file=LONG, response_format="verbose_json")).json()
    text = await _post(client, file=LONG, response_format="text")
    assert text.headers["content-type"] == "text/plain; charset=utf-8"
    assert text.text == verbose["text"] + "\n"
    srt = (await _post(client, file=LONG, response_format="srt")).text
    blocks = [block.split("\n") for block in srt.strip().split("\n\n")]
    assert [int(block[0]) for block in blocks] == [*range(1, len(verbose["segments"]) + 1)]
    assert re.fullmatch(r"00:00:0\d,\d{3} --> 00:0\d:\d\d,\d{3}", blocks[0][1])
    assert blocks[0][2] == verbose["segments"][0]["text"].strip()
    vtt = await _post(client, file=LONG, response_format="vtt")
    assert vtt.headers["content-type"] == "text/vtt; charset=utf-8"
    assert vtt.text.startswith("WEBVTT\n\n00:00:0")
    assert vtt.text.count(" --> ") == len(verbose["segments"])
    assert str(
        await sdk.audio.transcriptions.create(file=("a.wav", SHORT), model="english", response_format="text")
    )


@pytest.mark.parametrize("form", ["flac", "ogg", "mp3", "m4a", "webm"])
async def test_every_format_is_taken(client: httpx.AsyncClient, form: str) -> None:
    reply = await _post(client, file=sound_file(2.0, form), response_format="verbose_json")
    assert reply.status_code == 200, reply.text
    assert reply.json()["duration"] == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "nobody"}, 404, "model_not_found", "model"),
        ({"model": "antiphon-scripted"}, 400, "unsupported_model", "model"),
        ({"response_format": "mp4"}, 400, "invalid_value", "response_format"),
        ({"response_format": "diarized_json"}, 400, "unsupported_parameter", "response_format"),
        ({"known_speaker_names[]": "ann"}, 400, "unsupported_parameter", "known_speaker_names[]"),
        ({"temperature": "hot"}, 400, "invalid_type", "temperature"),
        ({"temperature": "nan"}, 400, "invalid_value", "temperature"),
        ({"temperature": "1.5"}, 400, None, "temperature"),
        ({"language": "tlh"}, 400, "invalid_value", "language"),
        ({"timestamp_granularities[]": "word"}, 400, "invalid_value", "timestamp_granularities"),
        (
            {"timestamp_granularities[]": "line", "response_format": "verbose_json"},
            400,
            "invalid_value",
            None,
        ),
        ({"include[]": "logprobs", "response_format": "text"}, 400, "invalid_value", "include"),
        ({"include[]": "everything"}, 400, "invalid_value", None),
        ({"stream": "perhaps"}, 400, "invalid_type", "stream"),
        ({"stream": "true", "response_format": "srt"}, 400, "invalid_value", "stream"),
        ({"chunking_strategy": "never"}, 400, "invalid_value", None),
        ({"chunking_strategy": "{"}, 400, "invalid_value", "chunking_strategy"),
        ({"file": b"no sound at all"}, 400, "invalid_file", "file"),
        ({"file": sound_file(0.05)}, 400, "invalid_file", "file"),
        ({"file": b""}, 400, "invalid_file", "file"),
        ({"file": sound_file(71.0, rate=8_000)}, 400, "file_too_large", "file"),
        ({"file": bytes(3_000_001)}, 413, "request_too_large", "file"),
        ({"file": b"no sound at all", "stream": "true"}, 400, "invalid_file", "file"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_cannot_be_done_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    reply = await _post(client, **fields)
    error = validate_error(reply.json())
    assert reply.status_code == status, error
    assert code is None or error["code"] == code
    assert param is None or error["param"] == param


async def test_a_form_without_a_file_and_no_form_at_all(client: httpx.AsyncClient) -> None:
    reply = await client.post(PATH, files={"model": (None, "whisper-1")})
    assert validate_error(reply.json())["param"] == "file" and reply.status_code == 400
    reply = await client.post(PATH, json={"model": "whisper-1"})
    assert reply.status_code == 415
    reply = await client.post(PATH, files={"model": (None, "whisper-1"), "file": (None, "text")})
    assert validate_error(reply.json())["param"] == "file" and reply.status_code == 400


async def test_fields_without_effect_are_named(client: httpx.AsyncClient) -> None:
    vad = {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "0.3", "speed": "2"}
    reply = await _post(client, **vad)
    assert reply.status_code == 200
    assert set(reply.headers["x-antiphon-ignored"].split(",")) == {"chunking_strategy", "speed"}
    reply = await _post(client, chunking_strategy="auto")
    assert "x-antiphon-ignored" not in reply.headers
    for path in (PATH, PATH.replace("transcriptions", "translations")):
        reply = await _post(client, f"{path}?unheard_of=1")
        assert reply.headers["x-antiphon-ignored"] == "?unheard_of"
    one, other = await _post(client, language="german"), await _post(client, language="de-AT")
    assert one.json() == other.json()


async def test_a_repeat_with_the_same_key_gets_the_same_reply(
    client: httpx.AsyncClient, server: Running
) -> None:
    engine = (await server.context.models.load_speech("whisper-1")).engine
    client.headers["idempotency-key"] = "heard-once"
    try:
        first = await _post(
            client, **{"timestamp_granularities[]": ["word"], "response_format": "verbose_json"}
        )
        before = engine.stats().windows_total
        second = await _post(
            client, **{"timestamp_granularities[]": ["word"], "response_format": "verbose_json"}
        )
        assert second.json() == first.json() and second.headers["idempotent-replayed"] == "true"
        assert engine.stats().windows_total == before
        other = {"timestamp_granularities[]": ["segment"], "response_format": "verbose_json"}
        assert (await _post(client, **other)).status_code == 409
    finally:
        del client.headers["idempotency-key"]


async def test_who_leaves_ends_the_work(server: Running, client: httpx.AsyncClient) -> None:
    engine = (await server.context.models.load_speech("whisper-1")).engine
    before = engine.stats().windows_total
    request = {"data": {"model": "whisper-1", "stream": "true"}, "files": {"file": ("a.wav", LONG)}}
    async with client.stream("POST", PATH, **request) as reply:
        async for _ in reply.aiter_lines():
            break
    while engine.stats().windows_waiting or engine.admission.num_places:
        await asyncio.sleep(0.01)
    assert engine.stats().windows_total < before + 3
    # what was stored for the request is gone, and another one is served
    assert (await _post(client)).status_code == 200


async def test_requests_wait_for_nobody_else(server: Running, client: httpx.AsyncClient) -> None:
    """While a long sound is heard, others are answered."""
    long = asyncio.create_task(_post(client, file=LONG))
    engine = (await server.context.models.load_speech("whisper-1")).engine
    while not engine.stats().windows_waiting:
        await asyncio.sleep(0.005)
    assert (await client.get("/v1/models")).status_code == 200
    assert not long.done()
    assert (await long).status_code == 200


async def test_what_was_heard_is_counted(server: Running, client: httpx.AsyncClient) -> None:
    before = await used(server, "audio_transcriptions")
    await _post(client)
    after = await used(server, "audio_transcriptions")
    assert after.input_tokens - before.input_tokens == 3  # seconds
    assert after.requests - before.requests == 1


async def test_the_model_is_listed_and_measured(client: httpx.AsyncClient) -> None:
    listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
    assert listed["whisper-1"]["used_for"] == "speech"
    assert listed["whisper-1"]["languages"] == ["de", "en", "fr"]
    assert (await client.get("/v1/models/english")).json()["languages"] == ["en"]
    page = (await client.get("/metrics")).text
    assert re.search(r'antiphon_speech_seconds_total\{model="whisper-1"\} [1-9]', page)
    shown = re.findall(r"^# TYPE antiphon_speech_(\w+)", page, re.MULTILINE)
    rows = [row for row in GUIDE.read_text("utf-8").splitlines() if row.startswith("| `antiphon_speech_")]
    explained = re.findall(r"`(?:antiphon_speech)?_(\w+)`", "".join(row.split("|")[1] for row in rows))
    assert sorted(shown) == sorted(explained)
    reply = await client.post("/v1/responses", json={"model": "whisper-1", "input": "hello"})
    assert reply.status_code == 400
    assert "/v1/audio/transcriptions" in validate_error(reply.json())["message"]


async def test_a_server_without_a_model_names_the_setting(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        for path in (PATH, "/v1/audio/translations"):
            for name, status in (("whisper-1", 404), ("antiphon-scripted", 400)):
                reply = await _post(client, path, model=name)
                assert reply.status_code == status
                assert "--speech-model" in validate_error(reply.json())["message"]
        described = (await client.get("/openapi.json")).json()["components"]["schemas"]
        assert "timestamp_granularities[]" in described["CreateTranscription"]["properties"]


async def test_what_decodes_sounds_is_started_before_the_first_one(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Event()
    monkeypatch.setattr(lifecycle, "prepare_sounds", started.set)
    await server.life.prepare()
    assert started.is_set()
