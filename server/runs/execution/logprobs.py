"""Log probabilities in the log: as bytes of a record, and back.

Owns their stored form. It is exact, so that a generation that goes on shows what it would have shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from engine import TokenLogprob


def dump_logprobs(logprobs: Sequence[TokenLogprob]) -> bytes:
    """JSON rows [id, text, bytes in hex, logprob, [the same four for each alternative]]."""
    return orjson.dumps(
        [
            [
                entry.token_id,
                entry.token,
                entry.data.hex(),
                entry.logprob,
                [[token_id, token, data.hex(), logprob] for token_id, token, data, logprob in entry.top],
            ]
            for entry in logprobs
        ]
    )


def load_logprobs(data: bytes) -> tuple[TokenLogprob, ...]:
    """The reverse of `dump_logprobs`."""
    return tuple(
        TokenLogprob(
            token_id,
            token,
            bytes.fromhex(hex),
            logprob,
            tuple((top_id, text, bytes.fromhex(top_hex), value) for top_id, text, top_hex, value in top),
        )
        for token_id, token, hex, logprob, top in orjson.loads(data)
    )
