"""Response objects as bytes: what is read of them without parsing what is long."""

from __future__ import annotations

import orjson
import pytest

from server.runs.events import join_response, short_members

SHORT = {
    "moderation": {"input": {"type": "x"}, "output": {"type": "x"}},
    "status": "failed",
    "error": {"message": 'it said ,"output":[ to me'},
    "usage": {"output_tokens": 3},
}
NESTED = b'[{"arguments":{"a":1,"output":[1],"usage":{}}}]'


@pytest.mark.parametrize("more", [b"", b',"input_messages":' + NESTED + b',"output_messages":[]'])
def test_short_members_are_read_without_the_output(more: bytes) -> None:
    head = orjson.dumps(SHORT)[:-1] + more + b"}"
    response = join_response(head, [b"[" * 1000], b'"usage":"of the echo"')
    assert short_members(response) == SHORT
