"""What commands read of a server: lines of streams, replies, and what cannot be asked at all."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from server.cli.connection import ChatError, read_events, read_json, server_client, trouble


class Pieces(httpx.SyncByteStream):
    """A body that comes a byte at a time."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        return (self._body[at : at + 1] for at in range(len(self._body)))


def streamed(body: bytes) -> list[dict[str, Any]]:
    return list(read_events(httpx.Response(200, stream=Pieces(body))))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("colon", [b": ", b":"])
def test_a_line_of_a_stream_ends_as_the_standard_says_and_nowhere_else(end: bytes, colon: bytes) -> None:
    event = {"type": "response.output_text.delta", "delta": "a\u2028b\u2029c\u0085d\u00e9"}
    data, kind = b"data" + colon, b"event" + colon + event["type"].encode()
    lines = [b": a comment", kind, data + orjson.dumps(event), b""]
    assert streamed(end.join([*lines, *lines, data + b"[DONE]", b"", data + b"no event"])) == [event, event]


def test_an_event_that_was_cut_is_none() -> None:
    assert streamed(b'data: {"a":1}\n\ndata: {"b"') == [{"a": 1}]


@pytest.mark.parametrize("data", [b"<html>", b"[]", b'{"a":', b"\xff"])
def test_data_that_are_no_event_are_told(data: bytes) -> None:
    with pytest.raises(ChatError, match="does not speak this API"):
        streamed(b"data: " + data + b"\n\n")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"error": {"message": "No such path."}}, "No such path."),
        ({"error": "no such path"}, "no such path"),
        ({"error": {"code": 7}}, "{'code': 7}"),
        ({"error": None}, "status 404"),
        ({"detail": "Not Found"}, "status 404"),
        (["no such path"], "does not speak this API"),
        ("no such path", "does not speak this API"),
    ],
)
def test_a_refusal_in_any_form_is_told(body: object, told: str) -> None:
    with pytest.raises(ChatError) as refused:
        read_json(httpx.Response(404, content=orjson.dumps(body)))
    assert told in str(refused.value) and refused.value.status == 404


def options(key: str | None) -> argparse.Namespace:
    return argparse.Namespace(url="http://127.0.0.1:9", api_key=key)


@pytest.mark.parametrize("key", ["sk-1", "sk-1\r", "sk-1\r\n", " sk-1\n"])
def test_a_key_is_sent_without_what_is_around_it(key: str) -> None:
    with server_client(options(key)) as http:
        assert http.headers["authorization"] == "Bearer sk-1"


@pytest.mark.parametrize("key", [None, "", "\r\n"])
def test_no_key_is_no_header(key: str | None) -> None:
    with server_client(options(key)) as http:
        assert "authorization" not in http.headers


@pytest.mark.parametrize("key", ["sk-sec\rret", "sk-sec\u2026ret", "sk-sec\udce9ret", "sk-sec\x00ret"])
def test_a_key_that_cannot_be_sent_is_not_repeated(key: str) -> None:
    with pytest.raises(
        ValueError, match=r"^the API key cannot be sent: a header's value is printable ASCII$"
    ):
        server_client(options(key))


def test_words_that_repeat_a_header_are_not_told() -> None:
    error = httpx.LocalProtocolError("Illegal header value b'Bearer sk-secret\\r'")
    assert "secret" not in trouble(error, "http://127.0.0.1:9")


def test_a_reply_that_is_no_object_is_told() -> None:
    with pytest.raises(ChatError, match="status 200 without a JSON object"):
        read_json(httpx.Response(200, content=b"[]"))
