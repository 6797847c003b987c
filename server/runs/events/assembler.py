"""Turns what the engine says into the events of a response, and events back into its output.

The assembler makes item ids and output indices, and closes whatever is open as incomplete before the terminal
event, so every stream is well formed. It is pure: it has no clock, randomness or I/O, so that replaying the
same tokens gives the same events. A draft is an event without its sequence number. How a call becomes an
item, and how an outcome is written into it, is said by the item types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import orjson
from orjson import Fragment

from engine import CallArgs, CallEnd, CallStart, Delta, Done, Reasoning, Text, TokenLogprob
from server.items import (
    ABANDONED,
    BESIDE,
    COMPACTING,
    COMPACTION,
    ITEM_TYPES,
    SEALED,
    ArgumentReader,
    Call,
    Compacted,
    Elsewhere,
    Execution,
    Item,
    Listing,
    Private,
    Route,
    Source,
    Sources,
    Tool,
    Whole,
    approval_of,
    asks_approval,
    broken_in_a_row,
    call_of,
    configuration_of,
    execution_of,
    filled,
    is_running,
    is_unfinished_compaction,
    listed_elsewhere,
    num_tool_calls,
    private_of,
    source_of,
    type_asked_for,
    with_private,
)
from server.runs.events.citations import CitationReader, FileLinks, link
from tools import Listing as ServerListing
from tools import ToolResult

if TYPE_CHECKING:
    from server.encrypted_reasoning import Seal

Draft = dict[str, Any]

CLIENT = Route("function_call")
"""Where a call of a function leads that nobody told of: to the client."""


TOLD_EVERY = 64
"""Characters of a summary after which an event tells that more of it was written. Each record of a run has an
event, so that a crash loses no more than these."""

UNMADE = ToolResult(error="The response ended before this call was made.")
"""The outcome of a call that had not begun when its response ended."""


def _unmade(_call: Item) -> ToolResult:
    return UNMADE


def derived_id(secret: bytes, kind: str, index: int | str) -> str:
    """The id of the `index`-th output item: made of the run's stored secret, so a replay makes the same."""
    return ITEM_TYPES[kind].prefix + _digest(secret, kind, index)


def _call_id(secret: bytes, index: int) -> str:
    """The id of a call, by which its output names it."""
    return "call_" + _digest(secret, "call", index)[:24]


def _digest(secret: bytes, kind: str, index: int | str) -> str:
    return hashlib.blake2b(f"{kind}:{index}".encode(), key=secret, digest_size=24).hexdigest()


def item_logprob(entry: TokenLogprob) -> dict[str, Any]:
    """A token's log probability as items and chat choices carry it, with bytes."""
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "bytes": list(entry.data),
        "top_logprobs": [
            {"token": token, "logprob": logprob, "bytes": list(data)} for _, token, data, logprob in entry.top
        ],
    }


def encoded(logprob: Mapping[str, Any]) -> Fragment:
    """A token's log probability as JSON. There are as many as tokens, each of dozens of objects: kept as
    such, they make every pass of the garbage collector longer, and the JSON of a whole answer takes so long
    to write that it holds up everybody."""
    return Fragment(orjson.dumps(logprob))


class _Scored(NamedTuple):
    """The log probabilities of an item's tokens, encoded, as the item and as stream events carry them."""

    kept: list[Fragment]
    shown: list[Fragment]

    @classmethod
    def of(cls, entries: Iterable[Mapping[str, Any]]) -> _Scored:
        """Of log probabilities as items carry them; events have no bytes."""
        scored = cls([], [])
        for entry in entries:
            tops = [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]]
            scored.kept.append(encoded(entry))
            shown = {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": tops}
            scored.shown.append(encoded(shown))
        return scored

    def extend(self, other: _Scored) -> None:
        """Add those of further tokens."""
        self.kept.extend(other.kept)
        self.shown.extend(other.shown)


@dataclass(slots=True)
class _Open:
    """The output item that is being written: what deltas add to, until it is closed.

    item: empty as long as it is not added, which a call may not be before its arguments are whole. call: how
    it is written, where it is a call, and of which name. lists: whose tools it lists, where it is the listing
    of another server that is being asked. asks: whether the client is asked before it is made.
    citations, links: read them out of the text, where it can have any. unsaid: log probabilities of what
    it holds back. content: of a compaction, what it stands for but for the summary that is being written;
    None where that is one of several. num_written: characters of that summary, and of the thoughts before it.
    """

    index: int
    item: Item
    pieces: list[str] = field(default_factory=list)
    logprobs: _Scored = field(default_factory=lambda: _Scored.of(()))
    annotations: list[dict[str, Any]] = field(default_factory=list)
    citations: CitationReader | None = None
    links: FileLinks | None = None
    unsaid: _Scored = field(default_factory=lambda: _Scored.of(()))
    call: Call | None = None
    lists: Elsewhere | None = None
    name: str | None = None
    asks: bool = False
    reader: ArgumentReader | None = None
    content: Compacted | None = None
    num_written: int = 0

    def at(self, type_: str, **fields: Any) -> Draft:
        return {"type": type_, "item_id": self.item["id"], "output_index": self.index, **fields}

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Assembler:
    """Builds one response's output.

    secret: the run's, for ids. routes: function name -> where its calls lead, None where any function may be
    called, all the client's; nobody can answer a call of another one, so it ends as broken. logprobs: whether
    text carries them. include: what items are to say besides, by values of `include`. context: the items
    before the output. cites: whether markers in a text become links to the sources that the model was shown.
    seal: seals the content of reasoning, which is pure as well. seals_private: whether it also seals private
    halves, because nobody but the client keeps the items. output, unfinished: what `fold` made of its events,
    when a run goes on.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        routes: Mapping[str, Route] | None = None,
        logprobs: bool = False,
        include: Sequence[str] = (),
        context: Iterable[Item] = (),
        cites: bool = True,
        seal: Seal | None = None,
        seals_private: bool = False,
        output: Iterable[Item] = (),
        unfinished: Iterable[int] = (),
    ) -> None:
        self._secret = secret
        self._routes = routes
        self._logprobs = logprobs
        self.max_calls: int | None = None
        """Of this server's tools, so many calls are made at most."""
        context = list(context)
        self.first_item = 0
        """The output index of the first item that the generation at work, or the last one, has made."""
        self.settings = configuration_of(context)
        self._include = include
        self._cites = cites
        self._seal = seal
        self._seals_private = seals_private
        self.compaction_seal: Seal | None = None
        """What seals compactions; None where none can be made."""
        self.output: list[Item] = list(output)
        self._sources = Sources()
        self.know(context)
        self._running: dict[str, int] = {  # calls whose outcome is still to come: item id -> output index
            item["id"]: index for index, item in enumerate(self.output) if is_running(item)
        }
        left = (index for index in unfinished if index not in self._running.values())
        self._open: _Open | None = next((self._reopened(index) for index in left), None)
        self._closed: list[tuple[int, Item]] = []  # since `take_closed`

    # -- what the engine says --------------------------------------------------------------------------------

    def feed(self, deltas: Sequence[Delta]) -> list[Draft]:
        """Drafts for one chunk's deltas."""
        if self._open is not None and self.is_summarising:
            return self._summarise(self._open, deltas)
        drafts: list[Draft] = []
        for delta in deltas:
            match delta:
                case Text():
                    self._text(delta, drafts)
                case Reasoning():
                    self._reasoning(delta.text, drafts)
                case CallArgs():
                    self._arguments(delta.text, drafts)
                case CallStart():
                    self._call(delta.name, drafts)
                case CallEnd():
                    self._close(drafts, "completed" if delta.complete else "incomplete")
                case Done():
                    self._close(drafts, "completed" if delta.reason == "stop" else "incomplete")
        return drafts

    def _text(self, delta: Text, drafts: list[Draft]) -> None:
        part = self._open_part("message", drafts, phase="commentary" if delta.preamble else None)
        if self._logprobs:
            part.unsaid.extend(_Scored.of(map(item_logprob, delta.logprobs)))
        for piece in [delta.text] if part.citations is None else part.citations.feed(delta.text):
            if isinstance(piece, str):
                self._say(part, piece, drafts)
            else:
                self._cite(part, piece, drafts)

    def _say(self, part: _Open, text: str, drafts: list[Draft]) -> None:
        scored, part.unsaid = part.unsaid, _Scored.of(())
        part.pieces.append(text)
        part.logprobs.extend(scored)
        said = {"delta": text, "logprobs": scored.shown}
        drafts.append(part.at("response.output_text.delta", content_index=0, **said))
        if part.links is not None:
            for annotation in part.links.feed(text):
                self._annotate(part, annotation, drafts)

    def _annotate(self, part: _Open, annotation: dict[str, Any], drafts: list[Draft]) -> None:
        place = {"content_index": 0, "annotation_index": len(part.annotations)}
        part.annotations.append(annotation)
        drafts.append(part.at("response.output_text.annotation.added", **place, annotation=annotation))

    def _cite(self, part: _Open, source: Source, drafts: list[Draft]) -> None:
        """A link to a source in the place of its marker, and the annotation of it. A passage of a file has no
        link, and the annotation says where the marker stood, in code points."""
        if source.file_id is not None:
            place = {"file_id": source.file_id, "filename": source.title, "index": len(part.text)}
            self._annotate(part, {"type": "file_citation", **place}, drafts)
            return
        before, cited = part.text, link(source)
        space = " " if before and not before[-1].isspace() else ""
        self._say(part, f"{space}{cited}", drafts)
        start = len(before) + len(space)  # in code points
        annotation = {
            "type": "url_citation",
            "url": source.url,
            "title": source.title,
            "start_index": start,
            "end_index": start + len(cited),
        }
        self._annotate(part, annotation, drafts)

    def _reasoning(self, text: str, drafts: list[Draft]) -> None:
        part = self._open_part("reasoning", drafts)
        part.pieces.append(text)
        drafts.append(part.at("response.reasoning_text.delta", content_index=0, delta=text))

    def _call(self, name: str, drafts: list[Draft]) -> None:
        self._close(drafts, "completed")
        route = self._route(name)
        call = ITEM_TYPES[route.type].call
        assert call is not None, "routes lead to calls"
        opened = _Open(len(self.output), {}, call=call, name=name, asks=route.asks)
        if call.stream is not None:
            opened.reader = None if call.stream.reader is None else call.stream.reader()
            if not opened.asks:  # nobody is asked for a call before it is whole
                self._add_call(opened, route, "", drafts)
        self._open = opened

    def _add_call(
        self, opened: _Open, route: Route, arguments: str, drafts: list[Draft], **fields: Any
    ) -> None:
        """Add the item of a call that leads to a route, of which these arguments and fields are known."""
        name, call = opened.name or "", ITEM_TYPES[route.type].call
        assert call is not None, "routes lead to calls"
        opened.call = call
        opened.item = {"id": self._id(route.type), "type": route.type, "status": "in_progress"}
        opened.item |= route.fields
        opened.item |= call.opened(name, _call_id(self._secret, opened.index), arguments)
        opened.item |= {**fields, **route.fields}  # the name that the call has elsewhere may be another one
        if call.refers is not None:
            call.refers(opened.item, arguments, self._sources)
        self._add(opened, drafts)
        drafts += [opened.at(event) for event in call.opens]

    def _route(self, name: str) -> Route:
        if self._routes is None:
            return CLIENT
        if name in self._routes:
            return self._routes[name]
        # Where the server has tools of its own, it tells the model that there is none of this name.
        own = (route for route in self._routes.values() if execution_of({"type": route.type, **route.fields}))
        route = next(own, CLIENT)
        return Route(route.type, {key: value for key, value in route.fields.items() if key != "name"})

    def _is_offered(self, name: str | None) -> bool:
        return self._routes is None or name is None or name in self._routes

    def _arguments(self, text: str, drafts: list[Draft]) -> None:
        opened = self._open
        if opened is not None and opened.reader is not None:
            text = opened.reader.feed(text)
        if opened is None or opened.call is None or not text:
            return
        opened.pieces.append(text)
        if opened.call.stream is not None and opened.item:
            drafts.append(opened.at(f"{opened.call.stream.event}.delta", delta=text))

    def _fault(self, name: str | None, count: int) -> str:
        """What the model is told of a server-run call that cannot be made, the `count`-th in a row."""
        again = f" It is number {count} of such calls in a row." if count > 1 else ""
        if not self._is_offered(name):
            known = ", ".join(sorted(self._routes or ()))
            return f"There is no tool named {name!r}. The tools are: {known}.{again}"
        return f"The call is not whole: its arguments are cut short, or no JSON.{again}"

    # -- compaction ------------------------------------------------------------------------------------------

    def compaction_begun(self) -> list[Draft]:
        """Drafts of a compaction, up to the moment when something is known of it."""
        drafts: list[Draft] = []
        self._close(drafts, "completed")
        item = {"id": self._id(COMPACTION), "type": COMPACTION, "encrypted_content": ""}
        self._open = self._add(_Open(len(self.output), item), drafts)
        return drafts

    def summary_begins(self, content: Compacted | None) -> None:
        """What the engine says from now on is a summary. content: what the compaction stands for beside it;
        None where this is not the last of several."""
        assert self._open is not None, "a compaction was begun"
        self._open.content, self._open.pieces, self._open.num_written = content, [], 0

    @property
    def is_summarising(self) -> bool:
        """Whether what the engine says is a summary, of a compaction that has not ended."""
        return self._open is not None and self._open.item.get("type") == COMPACTION

    @property
    def summary(self) -> str:
        """What is written of the summary that goes on, or of the last one of several."""
        return "" if self._open is None else self._open.text.strip()

    def compacted(self, content: Compacted) -> list[Draft]:
        """Drafts of the end of a compaction. What the items before it say of settings is said again behind
        it, because its client need not keep them."""
        drafts: list[Draft] = []
        opened, self._open = self._open, None
        assert opened is not None, "a compaction was begun"
        self._close_compaction(opened, content.dump(), drafts)
        if self.settings:
            row = ITEM_TYPES["configuration_update"]
            item = {"id": self._id(row.type), "type": row.type, **self.settings}
            self._item_done(self._add(_Open(len(self.output), item), drafts), drafts)
        return drafts

    def _summarise(self, opened: _Open, deltas: Sequence[Delta]) -> list[Draft]:
        before = opened.num_written // TOLD_EVERY
        ended = False
        for delta in deltas:
            if isinstance(delta, Text | Reasoning):
                opened.num_written += len(delta.text)
            if isinstance(delta, Text):
                opened.pieces.append(delta.text)
            ended = ended or isinstance(delta, Done)
        if ended and opened.content is not None:
            return self.compacted(replace(opened.content, summary=self.summary or None))
        more = ended or opened.num_written // TOLD_EVERY > before
        return [opened.at(COMPACTING)] if more else []

    def _close_compaction(self, opened: _Open, private: Mapping[str, Any], drafts: list[Draft]) -> None:
        if self.compaction_seal is not None:
            opened.item["encrypted_content"] = self.compaction_seal.compacted(opened.item["id"], private)
        opened.item = with_private(filled(opened.item, private, self._include), private)
        self.output[opened.index] = opened.item
        self._item_done(opened, drafts)

    # -- what the server does itself -------------------------------------------------------------------------

    def tools_listed(self, route: Route, functions: Sequence[Tool]) -> list[Draft]:
        """Drafts of a finished listing of the functions that lead to a route."""
        drafts: list[Draft] = []
        self._close(drafts, "completed")
        listing = self._listing(route)
        opened = self._add_listing(listing, route, drafts)
        opened.item |= listing.filled(functions)
        drafts.append(opened.at(listing.events[-1]))
        self._item_done(opened, drafts)
        return drafts

    def listing_begun(self, route: Route) -> list[Draft]:
        """Drafts of the listing of another server's tools, up to the moment when the server is asked. None
        where that was begun already, before a crash."""
        left = self._open
        if left is not None and left.lists is not None and left.item.items() >= route.fields.items():
            return []
        drafts: list[Draft] = []
        self._close(drafts, "completed")
        self._open = self._add_listing(self._listing(route), route, drafts)
        self._open.lists = listed_elsewhere(self._open.item)
        return drafts

    def server_listed(self, route: Route, answer: ServerListing) -> list[Draft]:
        """Drafts of the end of such a listing, by what the server answered."""
        drafts: list[Draft] = []
        opened, self._open = self._open, None
        assert opened is not None and opened.lists is not None, "it was begun"
        last = self._listing(route).events[-1] if answer.error is None else opened.lists.failed
        self._close_listing(opened, answer, last, drafts)
        return drafts

    def _add_listing(self, listing: Listing, route: Route, drafts: list[Draft]) -> _Open:
        item = {"id": self._id(listing.type), "type": listing.type, **listing.opened(route)}
        opened = self._add(_Open(len(self.output), item), drafts)
        drafts += [opened.at(event) for event in listing.events[:-1]]
        return opened

    def _close_listing(self, opened: _Open, answer: ServerListing, event: str, drafts: list[Draft]) -> None:
        assert opened.lists is not None, "it lists another server's tools"
        opened.item |= opened.lists.listed(answer)
        drafts.append(opened.at(event))
        self._item_done(opened, drafts)

    def _listing(self, route: Route) -> Listing:
        execution = ITEM_TYPES[route.type].execution
        assert execution is not None and execution.listing is not None, "only what has a listing is listed"
        return execution.listing

    def lead(self, routes: Mapping[str, Route]) -> None:
        """Where calls lead from now on, by the names of functions."""
        self._routes = routes

    def know(self, context: Iterable[Item]) -> None:
        """The items before the output, whose sources can be referred to, as those of the output can."""
        self._sources = Sources((*context, *self.output))

    def call_approved(self, request: Item) -> list[Draft]:
        """Drafts of a call that was asked for and approved, up to the beginning of its execution."""
        drafts: list[Draft] = []
        self._close(drafts, "completed")
        row = type_asked_for(request)
        call, approval = row.call, approval_of(row)
        assert call is not None and call.execution is not None and approval is not None
        item = {"id": self._id(row.type), "type": row.type, "status": "in_progress"}
        opened = self._add(_Open(len(self.output), item | approval.made(request)), drafts)
        drafts += [opened.at(event) for event in call.opens]
        if (stream := call.stream) is not None:
            drafts.append(opened.at(f"{stream.event}.done", **{stream.field: opened.item[stream.field]}))
        asked = next(
            (index for index, item in enumerate(self.output) if item["id"] == request["id"]), opened.index
        )
        self._begin(opened, call.execution, drafts, place=asked)
        return drafts

    def _begin(self, opened: _Open, execution: Execution, drafts: list[Draft], *, place: int) -> None:
        """A whole call is about to be carried out; its outcome closes it. place: the index of the item by
        which it counts against the limit."""
        opened.item["status"] = execution.running
        self._running[opened.item["id"]] = opened.index
        drafts += [opened.at(event) for event in execution.starts]
        if self._are_spent(place):
            most = {0: "no tool calls", 1: "no more than 1 tool call"}
            calls = most.get(self.max_calls or 0, f"no more than {self.max_calls} tool calls")
            refusal = ToolResult(error=f"This response may make {calls}.")
            drafts += self.call_finished(opened.item["id"], refusal)

    def _are_spent(self, index: int) -> bool:
        """Whether the items before this one leave no call to be made."""
        return self.max_calls is not None and num_tool_calls(self.output[:index]) >= self.max_calls

    def call_shows(self, item_id: str, event: str, fields: Mapping[str, Any]) -> list[Draft]:
        """Drafts of what is shown of a call that this server carries out, before it has an outcome."""
        index = self._running[item_id]
        return [_Open(index, self.output[index]).at(event, **fields)]

    def call_finished(self, item_id: str, result: ToolResult) -> list[Draft]:
        """Drafts of the outcome of a call that this server has carried out."""
        drafts: list[Draft] = []
        index = self._running.pop(item_id)
        opened = _Open(index, self.output[index])
        self._finish(opened, result, drafts)
        self._item_done(opened, drafts)
        execution = execution_of(opened.item)
        if execution is not None and execution.follows is not None:
            self._follow(execution, execution.follows(opened.item, result), drafts)
        return drafts

    def _follow(self, execution: Execution, fields: Item | None, drafts: list[Draft]) -> None:
        """An item of its own for the outcome of a call, where there is one."""
        if fields is None:
            return
        item = {"id": self._id(fields["type"]), **fields}
        added, events = execution.tells(item)
        opened = self._add(_Open(len(self.output), {**item, **added}), drafts)
        drafts += [opened.at(event, **said) for event, said in events]
        opened.item |= item
        self._item_done(opened, drafts)

    def _finish(self, opened: _Open, result: ToolResult, drafts: list[Draft]) -> None:
        execution = execution_of(opened.item)
        assert execution is not None, "only calls that this server carries out have an outcome"
        event = execution.finish(opened.item, result)
        kept = {} if execution.keeps is None else execution.keeps(opened.item, result)
        private = {**kept, **self._beside(opened)}
        if private or execution.keeps is not None:
            opened.item = self._with_private(filled(opened.item, private, self._include), private)
            self.output[opened.index] = opened.item
            self._sources.add(opened.item)
        if event is not None:
            drafts.append(opened.at(event))

    def _with_private(self, item: Item, private: Private) -> Item:
        """An item with its private half, also sealed where its client alone keeps it. Of a type that has none
        but for its place among the calls of a turn it is not: that is worth no seal that may not open."""
        sealed = self._seals_private and ITEM_TYPES[item["type"]].has_private_half
        if self._seal is not None and sealed:
            item[SEALED] = self._seal.private_half(item["id"], private)
        return with_private(item, private)

    def _beside(self, opened: _Open) -> dict[str, Any]:
        """What the private half of a call says of its place among those of its generation. What was approved
        has none: what asked for the approval stands for it."""
        if source_of(opened.item) is not None:
            return {}
        for item in self.output[self.first_item : opened.index]:
            if execution_of(item) is not None or asks_approval(item):
                return {BESIDE: item["id"]}
        return {}

    def output_received(self, item: Item) -> list[Draft]:
        """Drafts of a tool output that a client fed to a waiting run."""
        drafts: list[Draft] = []
        self._close(drafts, "completed")
        received = with_private(dict(item), private_of(item))
        self._item_done(self._add(_Open(len(self.output), received), drafts), drafts)
        return drafts

    # -- ends ------------------------------------------------------------------------------------------------

    def ensure_output(self, since: int, reason: Literal["stop", "length"]) -> list[Draft]:
        """Drafts of an empty message when what was made from index `since` on, and ended for `reason`, said
        and called nothing. A thought that was cut short stands alone: nobody came to an answer."""
        drafts: list[Draft] = []
        made = self.output[since:]
        cut = bool(made) and made[-1].get("status") == "incomplete"
        if not cut and all(item["type"] == "reasoning" for item in made):
            self._open_part("message", drafts)
            self._close(drafts, "completed" if reason == "stop" else "incomplete")
        return drafts

    def interrupt(self, cut_short: Callable[[Item], ToolResult] = _unmade) -> list[Draft]:
        """Drafts that close whatever is open as incomplete. cut_short: the outcome of a call without
        one."""
        drafts: list[Draft] = []
        self._close(drafts, "incomplete")
        for item_id, index in list(self._running.items()):
            drafts += self.call_finished(item_id, cut_short(self.output[index]))
        return drafts

    @property
    def closed(self) -> list[Item]:
        """The items of the output that change no more."""
        changing = set(self._running.values())
        if self._open is not None:
            changing.add(self._open.index)
        return [item for index, item in enumerate(self.output) if index not in changing]

    def take_closed(self) -> list[tuple[int, Item]]:
        """The (output index, item) closed since the last call."""
        closed, self._closed = self._closed, []
        return closed

    # -- items -----------------------------------------------------------------------------------------------

    def _id(self, kind: str) -> str:
        return derived_id(self._secret, kind, len(self.output))

    def _add(self, opened: _Open, drafts: list[Draft]) -> _Open:
        """Add an item to the output, where none is open any more."""
        self.output.append(opened.item)
        drafts.append(
            {"type": "response.output_item.added", "output_index": opened.index, "item": _copy(opened.item)}
        )
        return opened

    def _open_part(self, kind: str, drafts: list[Draft], *, phase: str | None = None) -> _Open:
        """The open message or reasoning item, opened together with its only content part."""
        opened = self._open
        if opened is not None and opened.item.get("type") == kind and opened.item.get("phase") == phase:
            return opened
        self._close(drafts, "completed")
        item: Item = {"id": self._id(kind), "type": kind, "status": "in_progress"}
        item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        if phase is not None:
            item["phase"] = phase
        if kind == "reasoning":
            item["encrypted_content"] = None
        self._open = opened = self._add(_Open(len(self.output), item), drafts)
        if kind == "message" and self._cites and self._sources:
            opened.citations = CitationReader(self._sources)
        if kind == "message" and self._cites and self._sources.files:
            opened.links = FileLinks(self._sources.files)
        drafts.append(opened.at("response.content_part.added", content_index=0, part=_part(kind, "")))
        return opened

    def _reopened(self, index: int) -> _Open:
        """An item that a fold left open, as it was when its last event was made."""
        item = self.output[index]
        if (call := call_of(item)) is not None:
            written = [] if call.stream is None else [item[call.stream.field]]
            return _Open(index, item, written, call=call, name=self._name_of(item))
        if (lists := listed_elsewhere(item)) is not None:
            return _Open(index, item, lists=lists)
        if is_unfinished_compaction(item):
            return _Open(index, item)
        part = item["content"][0]
        scored, noted = _Scored.of(part.get("logprobs", ())), list(part.get("annotations", ()))
        return _Open(index, item, [part["text"]], scored, noted)

    def _name_of(self, item: Item) -> str | None:
        """The name by which a model called, which is another than the item's where its tool is shown under
        another one."""
        for name, route in (self._routes or {}).items():
            if route.type == item["type"] and "name" in route.fields and route.fields.items() <= item.items():
                return name
        own: str | None = item.get("name")
        return own

    def _close(self, drafts: list[Draft], status: str) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        if opened.call is not None:
            self._close_call(opened, opened.call, drafts, status)
            return
        if opened.item["type"] == COMPACTION:
            self._close_compaction(opened, ABANDONED, drafts)
            return
        if opened.lists is not None:
            cut = ServerListing(error="The response ended before the server had answered.")
            self._close_listing(opened, cut, opened.lists.failed, drafts)
            return
        if opened.citations is not None and (rest := opened.citations.rest()):
            self._say(opened, rest, drafts)
        if opened.links is not None:
            for annotation in opened.links.feed("", last=True):
                self._annotate(opened, annotation, drafts)
        item, text = opened.item, opened.text
        kind = item["type"]
        part = _part(kind, text, opened.logprobs.kept, opened.annotations)
        done: dict[str, Any] = {"text": text}
        if kind == "message":
            done["logprobs"] = opened.logprobs.shown
        drafts.append(opened.at(_TEXT_DONE[kind], content_index=0, **done))
        drafts.append(opened.at("response.content_part.done", content_index=0, part=part))
        item["content"] = [part]
        if kind == "reasoning" and self._seal is not None:
            item["encrypted_content"] = self._seal.thought(item["id"], item["content"])
        item["status"] = status
        self._item_done(opened, drafts)

    def _close_call(self, opened: _Open, call: Call, drafts: list[Draft], status: str) -> None:
        """The model has written a call: it is done, or, where the server carries it out, about to be."""
        text, stream = opened.text, call.stream
        offered = self._is_offered(opened.name)
        if opened.asks and offered and status == "completed" and not self._are_spent(opened.index):
            self._ask(opened, text, drafts)
            return
        if call.whole is not None:
            fields = call.whole.read(text) if status == "completed" else None
            route = self._route(opened.name or "")
            if fields is not None:
                self._add_whole(opened, call.whole, fields, drafts)
            elif execution_of({"type": route.type, **route.fields}) is not None:
                self._add_call(opened, route, "", drafts, **call.whole.broken)
                status = "incomplete"
            else:
                self._add_broken(opened, text, drafts)
                status = "incomplete"
        elif not opened.item:
            self._add_call(opened, self._route(opened.name or ""), text if stream is None else "", drafts)
            if stream is not None and text:
                drafts.append(opened.at(f"{stream.event}.delta", delta=text))
        if call.whole is None and stream is not None:
            opened.item[stream.field] = text
            named = {"name": opened.item["name"]} if stream.named else {}
            drafts.append(opened.at(f"{stream.event}.done", **named, **{stream.field: text}))
        if not offered:
            status = "incomplete"
        execution = execution_of(opened.item)
        if execution is None:
            opened.item["status"] = status
            if beside := self._beside(opened):
                opened.item = self.output[opened.index] = self._with_private(opened.item, beside)
        elif status == "completed":
            self._begin(opened, execution, drafts, place=opened.index)
            return
        else:
            fault = self._fault(opened.name, broken_in_a_row(self.output[: opened.index]) + 1)
            self._finish(opened, ToolResult(error=fault, kept={"broken": True}), drafts)
            opened.item["status"] = execution.broken
        self._item_done(opened, drafts)

    def _add_whole(self, opened: _Open, whole: Whole, fields: Item, drafts: list[Draft]) -> None:
        """Show a call that is read once it is whole."""
        self._add_call(
            opened, self._route(opened.name or ""), "", drafts, **{**fields, **whole.added(fields)}
        )
        opened.item |= fields
        drafts += [{**event, "output_index": opened.index} for event in whole.events(opened.item)]

    def _add_broken(self, opened: _Open, text: str, drafts: list[Draft]) -> None:
        """Show a call that cannot be read as what the model wrote, so that no client carries it out."""
        self._add_call(opened, CLIENT, "", drafts)
        assert opened.call is not None and opened.call.stream is not None, "function calls are streamed"
        stream = opened.call.stream
        if text:
            drafts.append(opened.at(f"{stream.event}.delta", delta=text))
        opened.item[stream.field] = text
        drafts.append(opened.at(f"{stream.event}.done", name=opened.name, **{stream.field: text}))

    def _ask(self, opened: _Open, arguments: str, drafts: list[Draft]) -> None:
        """Ask the client for a whole call, in an item that takes the call's place."""
        name = opened.name or ""
        route = self._route(name)
        approval = approval_of(ITEM_TYPES[route.type])
        assert approval is not None, "only calls that have a way to ask need approval"
        opened.item = {"id": self._id(approval.request), "type": approval.request}
        opened.item |= approval.asked(name, arguments)
        opened.item |= route.fields  # the name that the call has elsewhere may be another one
        opened.item = self._with_private(opened.item, {**approval.keeps(route), **self._beside(opened)})
        self._item_done(self._add(opened, drafts), drafts)

    def _item_done(self, opened: _Open, drafts: list[Draft]) -> None:
        drafts.append(
            {"type": "response.output_item.done", "output_index": opened.index, "item": _copy(opened.item)}
        )
        self._closed.append((opened.index, with_private(_copy(opened.item), private_of(opened.item))))


_TEXT_DONE = {"message": "response.output_text.done", "reasoning": "response.reasoning_text.done"}


def _part(
    kind: str, text: str, logprobs: Sequence[Any] = (), annotations: Sequence[Any] = ()
) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": list(annotations), "logprobs": list(logprobs)}


def _copy(item: Item) -> Item:
    """A draft's own copy: the item goes on changing, the draft must not."""
    copy = dict(item)
    if isinstance(copy.get("content"), list):
        copy["content"] = list(copy["content"])
    return copy


# ------------------------------------------------------------------------------------------------------------
# From events back


def fold(events: Iterable[Mapping[str, Any]]) -> tuple[list[Item], set[int]]:
    """The output items that a stream of events describes, and the indices of those still open.

    For a whole stream the items equal the terminal event's output; for a stream cut anywhere they hold what
    its deltas said.
    """
    output: list[Item] = []
    unfinished: set[int] = set()
    # What deltas add, by the index of its item and of its part (None: the item's own text). Joined once: a
    # long response has many deltas.
    growing: dict[tuple[int, int | None], _Growing] = {}
    for event in events:
        index: int = event.get("output_index", -1)
        match event["type"].removeprefix("response."):
            case "output_item.added":
                output.append(json.loads(json.dumps(event["item"])))
                unfinished.add(index)
            case "output_item.done":
                output[index] = dict(event["item"])
                unfinished.discard(index)
                growing = {place: grown for place, grown in growing.items() if place[0] != index}
            case "content_part.added" | "content_part.done":
                at = event["content_index"]
                output[index]["content"][at:] = [dict(event["part"])]
                growing[index, at] = _Growing(output[index]["content"][at], "text")
            case "output_text.delta" | "reasoning_text.delta":
                grown = growing[index, event["content_index"]]
                grown.texts.append(event["delta"])
                grown.logprobs.extend(map(_with_bytes, event.get("logprobs") or ()))
            case "output_text.annotation.added":
                part = output[index]["content"][event["content_index"]]
                part["annotations"] = [*part["annotations"], event["annotation"]]
            case _ if index >= 0 and (call := call_of(item := output[index])) is not None:
                if call.stream is not None and event["type"] == f"{call.stream.event}.delta":
                    grown = growing.setdefault((index, None), _Growing(item, call.stream.field))
                    grown.texts.append(event["delta"])
                _fold_call(item, call, event)
    for grown in growing.values():
        grown.settle()
    return output, unfinished


@dataclass(frozen=True, slots=True)
class _Growing:
    """What deltas have added to a field of a part or item that was not done."""

    of: dict[str, Any]
    name: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def settle(self) -> None:
        self.of[self.name] += "".join(self.texts)
        if self.logprobs:
            self.of["logprobs"] = [*self.of["logprobs"], *self.logprobs]


def _fold_call(item: Item, call: Call, event: Mapping[str, Any]) -> None:
    """What an event says of a call that is not done, beside its text."""
    if call.whole is not None:
        call.whole.fold(item, event)
    if call.execution is not None and event["type"] == call.last_event:
        item["status"] = call.execution.running


def _with_bytes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An event's log probability as an item carries it. Its bytes are those of its text, which is not exact
    for a token that holds a part of a character; only an item that a crash cut short ever shows them."""
    tops = [{**top, "bytes": list(top["token"].encode())} for top in entry["top_logprobs"]]
    return {**entry, "bytes": list(entry["token"].encode()), "top_logprobs": tops}
