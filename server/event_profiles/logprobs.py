"""Takes log probabilities out of JSON, so that the rest can be read and written anew.

A token has up to two kilobytes of them, and no profile changes them. To read them as well would hold the
interpreter, whichever thread does it, for as long as a whole response takes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

_BEGIN = b'"logprobs":[{'  # within a string the quotes would be escaped
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_DEPTH = 3  # of lists and objects in an entry: alternatives, one of them, its bytes


def _nested(depth: int) -> bytes:
    """What matches a list or an object of JSON that has so many more within each other."""
    inner = rb'[^"\[\]{}]++|' + _STRING + (b"|" + _nested(depth - 1) if depth else b"")
    return rb"[\[{](?:" + inner + rb")*+[\]}]"


_ENTRY = re.compile(_nested(_DEPTH) + b",?")


def without_logprobs(body: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """JSON, as orjson writes it, with a short text in the place of each list of log probabilities; and what
    puts the lists back into JSON that is made of it. Lets other threads run in between."""
    mark, rest, lists, at = secrets.token_hex(16).encode(), list[bytes](), list[bytes](), 0
    while (found := body.find(_BEGIN, at)) >= 0:
        begin = end = found + len(_BEGIN) - 1
        while (entry := _ENTRY.match(body, end)) is not None:
            end = entry.end()
        rest.append(body[at : begin - 1])
        at = end + 1
        if body[end:at] == b"]":
            rest.append(b'"%b%d"' % (mark, len(lists)))
            lists.append(body[begin - 1 : at])
        else:  # something else of this name, as in the schema of a tool
            rest.append(body[begin - 1 : at])
    rest.append(body[at:])
    marked = re.compile(b'"%b([0-9]+)"' % mark)
    return b"".join(rest), lambda told: marked.sub(lambda place: lists[int(place[1])], told)
