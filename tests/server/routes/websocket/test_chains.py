"""What a connection remembers of responses that are not stored."""

from __future__ import annotations

from server.http.websocket import OpenSockets
from server.routes.websocket.chains import MAX_BYTES, Chains
from server.runs.planning import Past

LARGE = Past(num_bytes=MAX_BYTES // 4)


async def test_an_id_that_is_used_again_counts_once() -> None:
    sockets = OpenSockets()
    chains = Chains(sockets, "ann")
    chains.keep("resp_other", None, LARGE)
    for _ in range(10):
        chains.keep("resp_same", None, LARGE)
    assert sockets.kept.num_bytes == 2 * LARGE.num_bytes
    assert chains.find("resp_other") is LARGE and chains.find("resp_same") is LARGE
    chains.keep("resp_same", None, Past(num_bytes=MAX_BYTES + 1))
    assert chains.find("resp_same") is None, "what it stood for before is over"
    chains.close()
    assert sockets.kept.num_bytes == 0


async def test_one_owner_does_not_have_others_forget() -> None:
    sockets = OpenSockets(max_kept_bytes=2 * MAX_BYTES)
    chains = Chains(sockets, "ann")
    chains.keep("resp_ann", None, LARGE)
    greedy = [Chains(sockets, "bob") for _ in range(3)]
    for each in greedy:
        for index in range(4):
            each.keep(f"resp_{index}", None, LARGE)
    assert chains.find("resp_ann") is LARGE
    assert [each.find("resp_3") for each in greedy] == [None, LARGE, LARGE]
    assert sockets.kept.num_bytes <= 2 * MAX_BYTES
