"""Owners: a foreign id is an unknown id, for every verb that a client reaches."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from storage import (
    ClosedItem,
    ConversationChange,
    NewFork,
    NewResponseFork,
    NotFound,
    Park,
    RunAppend,
    Storage,
)
from tests.support.making import OTHER, OWNER, call, message, new, now, output, record, turn

# verb -> a call of it that reaches into OWNER's rows (ids as made in `filled`), on behalf of `who`.
VERBS: dict[str, Callable[[Storage, str], Awaitable[Any]]] = {
    "add_conversation_items": lambda s, who: s.add_conversation_items(who, "c1", [message("new")]),
    "all_input_items": lambda s, who: s.all_input_items(who, "r1", limit=1),
    "add_tool_outputs": lambda s, who: s.add_tool_outputs(who, "waits", [output("a")], 1),
    "conversation_history": lambda s, who: s.conversation_history(who, "c1", as_of=1 << 50),
    "delete_conversation": lambda s, who: s.delete_conversation(who, "c1", 1),
    "delete_conversation_item": lambda s, who: s.delete_conversation_item(who, "c1", "seed", 1),
    "delete_response": lambda s, who: s.delete_response(who, "r1", 1),
    "fork_conversation": lambda s, who: s.fork_conversation(who, "c1", NewFork("c2", 1)),
    "fork_response": lambda s, who: s.fork_response(who, "r1", NewResponseFork("f1", 1, b"{}", b"", b"")),
    "get_conversation": lambda s, who: s.get_conversation(who, "c1"),
    "get_conversation_item": lambda s, who: s.get_conversation_item(who, "c1", "seed"),
    "get_response": lambda s, who: s.get_response(who, "r1"),
    "history": lambda s, who: s.history(who, previous_response_id="r1"),
    "input_items": lambda s, who: s.input_items(who, "r1", limit=1),
    "list_conversations": lambda s, who: s.list_conversations(who, limit=1, after="c1"),
    "list_responses": lambda s, who: s.list_responses(who, limit=1, after="r1"),
    "pending_calls": lambda s, who: s.pending_calls(who, "waits"),
    "request_cancel": lambda s, who: s.request_cancel(who, "waits"),
    "require_unlocked": lambda s, who: s.require_unlocked(who, "c1"),
    "start_response": lambda s, who: s.start_response(new("mine", owner=who, previous="r1")),
    "update_conversation": lambda s, who: s.update_conversation(who, "c1", ConversationChange(b"[]")),
    "clear_conversation": lambda s, who: s.clear_conversation(who, "c1", 9),
    "list_conversation_places": lambda s, who: s.list_conversation_places(who, "c1", limit=1),
}

UNSCOPED = {
    "admit", "append", "claim", "claim_due", "free_all", "give_back", "mark_watched", "release",
    "release_runs", "run_status", "take", "watched", "response_is_known", "free_models",
    "log_end", "records", "token_counts", "response_input", "waiting_inputs",
    "claim_deliveries", "disable_webhook", "due_deliveries", "put_off_delivery",
    "settle_delivery", "cap_deadlines", "hasten_deliveries",
}  # fmt: skip
"""What only the runner calls, with an id that it was given by a scoped verb or a claim."""

ELSEWHERE = {
    "beat", "close", "commit_stats", "dead", "hinted", "list_processes", "num_bytes", "num_bytes_by_owner",
    "num_live_runs", "conversation_epochs", "forget_shares", "gone_responses",
    "shrunk_conversations", "lacking_blobs", "open", "ready",
    "require_writable", "database_id", "newest", "shared_now", "is_over",  # of no owner
    "create_key", "find_key", "key_hash", "list_keys", "revoke_key",  # the administrator's
    "any_key", "change_key", "get_key", "key_family", "page_of_keys", "rotate_key", "touch_keys",
    "archive_owner", "create_owner", "ensure_owners", "get_owner", "limit_owner", "list_owners",
    "rename_owner", "add_audit", "audit_hash", "examine_audit", "list_audit",
    "add_sealing_key", "sealing_keys",  # the server's own
    "sweep", "purge", "purgeable", "export_responses", "export_conversations", "export_conversation_items",
    "owner_known", "live_runs", "run_owner", "response_owner",  # the administrator's
    "cancel_run", "usage_sums", "forget_person_usage",
    "add_usage", "fold_usage", "move_quotas", "sweep_quotas",  # of the caller, or of no owner
    "create_conversation", "get_items", "usage",  # name only the caller's own rows; below
    "begin_request", "complete_request", "drop_reply", "find_request", "release_request",  # the same
    "add_webhook", "get_webhook", "list_webhooks", "remove_webhook",  # the administrator's too
    "enable_webhook",
}  # fmt: skip


@pytest.fixture
async def filled(storage: Storage) -> Storage:
    await turn(storage, "r1", message("m1"))
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("seed")])
    await storage.start_response(new("waits"))
    closed = (ClosedItem(0, call("fc", "a")),)
    append = RunAppend("waits", 1, records=(record(2),), closed=closed, park=Park(10**16, 0))
    assert not await storage.append([append])
    return storage


def test_every_verb_is_looked_at() -> None:
    verbs = {name for name, value in inspect.getmembers(Storage, callable) if not name.startswith("_")}
    assert verbs == VERBS.keys() | UNSCOPED | ELSEWHERE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", VERBS)
async def test_a_foreign_id_is_an_unknown_id(filled: Storage, verb: str) -> None:
    with pytest.raises(NotFound) as foreign:
        await VERBS[verb](filled, OTHER)
    with pytest.raises(NotFound) as unknown:
        await VERBS[verb](filled, "a tenant without any rows")
    assert foreign.value.args == unknown.value.args
    await VERBS[verb](filled, OWNER)


async def test_the_same_names_in_another_house(filled: Storage) -> None:
    await filled.create_conversation(OTHER, "c2", now(), b"{}", [message("seed", b"theirs")])
    await turn(filled, "r2", message("m1", b"theirs"), owner=OTHER)
    assert (await filled.get_items(OWNER, ["m1", "seed"]))["m1"].body == message("m1").body
    assert {item.body for item in (await filled.get_items(OTHER, ["m1", "seed"])).values()} == {b"theirs"}
    assert [r.id for r in (await filled.list_responses(OTHER, limit=10)).data] == ["r2"]
    assert [h.item.body for h in await filled.history(OTHER, conversation_id="c2")] == [b"theirs"]
    with pytest.raises(NotFound):
        await filled.history(OTHER, conversation_id="c1")
    with pytest.raises(NotFound):
        await filled.start_response(new("r3", owner=OTHER, conversation="c1"))
    await filled.delete_response(OTHER, "r2", now())
    assert (await filled.get_items(OWNER, ["m1"]))["m1"].body == message("m1").body
