"""The tables of the database: their columns, keys and indexes, for SQLite and PostgreSQL alike.

Bodies, heads, echoes, plans and events are bytes that SQL never looks into; times are microseconds since the
epoch. Every row has an `owner` (a tenant) or belongs to a response or conversation that has one.

There are no foreign keys: rows outlive what they point to on purpose (a tombstoned response keeps its items
while a descendant needs them), and `garbage` decides what goes.

Two marks on columns are registries, and whoever adds a table uses them instead of naming it elsewhere. A text
column with `info=NAMES_BLOB` holds the digest of a blob, or null: the blob stays for as long as any row names
it. A column with `info=HELD_BYTES` says how many bytes a row keeps for its `owner` until somebody deletes it:
they count among what the owner stores. An index has both columns, the owner first: SQLite would walk through
every byte of a row that stands in front of the column.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    false,
    text,
)
from sqlalchemy import Text as AnyText

metadata = MetaData()

# Text is ordered byte by byte: the same on every database, and no new version of a system library changes it.
Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")

NAMES_BLOB = {"names_blob": True}
HELD_BYTES = {"held_bytes": True}

# SQLite counts up a key only if it is declared INTEGER, which holds 64 bits there.
_COUNTED = BigInteger().with_variant(Integer, "sqlite")


def _where(condition: str) -> dict[str, Any]:
    """Which rows an index has, on either database."""
    return {f"{database}_where": text(condition) for database in ("sqlite", "postgresql")}


# hidden: kept for the repeats of an idempotent request that asked for store=false; no read shows it.
# completed_at: when it ended, whichever way. log_erased_at: when its events were pruned; the response itself
# stays. num_bytes: what it takes, as retention measured it; 0 until then. An item that stands in a
# conversation as well counts there; a deleted response takes what its items do that a later one needs, and
# has no measure until the rest of it is erased.
# fork_of: the response whose items a fork has, up to this place in the order of its turn; see `lineage`.
responses = Table(
    "responses",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("completed_at", BigInteger),
    Column("status", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("background", Boolean, nullable=False),
    Column("store", Boolean, nullable=False),
    Column("head", LargeBinary, nullable=False),
    Column("echo", LargeBinary, nullable=False),
    Column("plan", LargeBinary, nullable=False),
    Column("previous_response_id", Text),
    Column("conversation_id", Text),
    Column("conversation_head", BigInteger),
    Column("deleted_at", BigInteger),
    Column("hidden", Boolean, nullable=False, server_default=false()),
    Column("log_erased_at", BigInteger),
    Column("num_bytes", BigInteger, nullable=False, server_default="0"),
    Column("fork_of", Text),
    Column("fork_direction", Text),
    Column("fork_position", Integer),
    Index("responses_by_time", "owner", "created_at", "id"),
    Index(  # all that retention asks for; SQLite reads what it is limited to from the rows unless it is in it
        "responses_by_end",
        *("owner", "hidden", "completed_at", "id", "num_bytes", "deleted_at"),
        **_where("completed_at IS NOT NULL AND deleted_at IS NULL"),
    ),
    Index(
        "responses_deleted",
        *("owner", "num_bytes", "deleted_at"),
        **_where("deleted_at IS NOT NULL"),
    ),
    Index(  # those that retention is still to measure, which are far behind younger ones where logs have gone
        "responses_unmeasured",
        *("owner", "completed_at", "id", "num_bytes", "deleted_at"),
        **_where("num_bytes = 0 AND completed_at IS NOT NULL AND deleted_at IS NULL"),
    ),
    Index("responses_by_parent", "previous_response_id"),
    Index(
        "responses_by_conversation",
        *("conversation_id", "created_at", "id"),
        **_where("conversation_id IS NOT NULL"),
    ),
    # A filtered list walks what it shows, and not its owner's history. The last column is that of the other
    # filter: where both are given, the rows themselves are read of those alone that pass both.
    Index(
        "responses_by_status",
        *("owner", "status", "created_at", "id", "model"),
        **_where("deleted_at IS NULL"),
    ),
    Index(
        "responses_by_model",
        *("owner", "model", "created_at", "id", "status"),
        **_where("deleted_at IS NULL"),
    ),
    Index(
        "responses_by_fork",
        *("fork_of", "fork_direction", "fork_position"),
        **_where("fork_of IS NOT NULL"),
    ),
)

# A client may choose item ids, so they are unique only within their owner. private: what the server keeps of
# an item besides its body, such as what a model was shown; no client is shown it.
items = Table(
    "items",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("call_id", Text),
    Column("name", Text),
    Column("body", LargeBinary, nullable=False),
    Column("private", LargeBinary),
)

# direction: "in" or "out"; ascending order of (direction, position) is the order of the turn.
response_items = Table(
    "response_items",
    metadata,
    Column("response_id", Text, primary_key=True),
    Column("direction", Text, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("item_id", Text, nullable=False),
    Index("response_items_by_item", "owner", "item_id"),
)

# head: the position that the next item takes. Positions are never given twice. num_bytes: what it takes with
# its items. used_at: when something was last added, changed or begun in it. parent_id: the conversation that
# a fork begins in; its items below position parent_head, the last of them parent_item, are the fork's first
# ones; see `lineage`. epoch: how often something was deleted of its own items; by the sum of its lineage, who
# keeps something that was made of what it shows knows whether all of it is still there. archived_at: since
# then it takes nothing new.
conversations = Table(
    "conversations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("head", BigInteger, nullable=False),
    Column("active_response_id", Text),
    Column("deleted_at", BigInteger),
    Column("num_bytes", BigInteger, nullable=False, server_default="0", info=HELD_BYTES),
    Column("used_at", BigInteger, nullable=False, server_default="0"),
    Column("parent_id", Text),
    Column("parent_head", BigInteger),
    Column("parent_item", Text),
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    Column("title", Text),
    Column("archived_at", BigInteger),
    Index("conversations_by_time", "owner", "created_at", "id"),
    Index(  # the list of these walks them, and not all conversations of their owner
        "conversations_archived",
        *("owner", "created_at", "id"),
        **_where("archived_at IS NOT NULL AND deleted_at IS NULL"),
    ),
    Index("conversations_by_size", "owner", "num_bytes"),
    Index(  # what responses and forks still need of deleted ones is never idle
        "conversations_by_use",
        "used_at",
        **_where("deleted_at IS NULL"),
    ),
    Index(
        "conversations_deleted",
        "id",
        **_where("deleted_at IS NOT NULL"),
    ),
    Index(
        "conversations_by_parent",
        *("parent_id", "parent_head", "id"),
        **_where("parent_id IS NOT NULL"),
    ),
)

# response_status: how the turn that brought it ended; it is needed for longer than the response. created_at:
# when the item came into the conversation; null for those of earlier versions.
conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation_id", Text, primary_key=True),
    Column("position", BigInteger, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("item_id", Text, nullable=False),
    Column("direction", Text, nullable=False),
    Column("response_id", Text),
    Column("response_status", Text),
    Column("deleted_at", BigInteger),
    Column("created_at", BigInteger),
    Index("conversation_items_by_item", "owner", "item_id", "conversation_id"),
    Index(
        "conversation_items_deleted",
        *("conversation_id", "deleted_at", "position", "owner"),
        **_where("deleted_at IS NOT NULL"),
    ),
)

# The log of each run, cut into segments; see `events`.
segments = Table(
    "segments",
    metadata,
    Column("id", _COUNTED, primary_key=True),
    Column("response_id", Text, nullable=False),
    Column("first_seq", BigInteger, nullable=False),
    Index("segments_by_response", "response_id", "first_seq", unique=True),
)

# created_at: when its events were made; NULL where an earlier version wrote it.
records = Table(
    "records",
    metadata,
    Column("segment", BigInteger, primary_key=True, autoincrement=False),
    Column("first_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("num_events", Integer, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("first_token", Integer, nullable=False),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary),
    Column("facts", LargeBinary),
    Column("events", LargeBinary, nullable=False),
    Column("created_at", BigInteger),
)

# Runs in flight: a row lives from the start to the terminal event. Narrow, because every commit touches it.
# attempt: how often an engine was given it, the last time when its log ended at admitted_seq; strikes: how
# often in a row without its getting much further. watched: raised by other processes while
# somebody reads there. cost: the tokens that it will probably take, its prompt's and its answer's.
runs = Table(
    "runs",
    metadata,
    Column("response_id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("runner", Text),
    Column("fence", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("strikes", Integer, nullable=False, server_default="0"),
    Column("admitted_seq", BigInteger, nullable=False, server_default="0"),
    Column("next_seq", BigInteger, nullable=False),
    Column("segment", BigInteger),
    Column("segment_end", BigInteger, nullable=False),
    Column("deadline", BigInteger),
    Column("cancel_requested", Boolean, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("created_at", BigInteger, nullable=False, server_default="0"),
    Column("watched", BigInteger, nullable=False, server_default="0"),
    Column("cost", Integer, nullable=False, server_default="1"),
    Index("runs_by_state", "state", "deadline"),
    Index("runs_by_owner", "owner", "created_at"),
    Index("runs_by_runner", "runner", "state"),
    Index(  # the queue, in its order but for what owners were served; SQLite asks a row for what it lacks
        "runs_queued",
        *("priority", "owner", "created_at", "response_id", "cost", "state", "runner"),
        **_where("runner IS NULL AND state = 'queued'"),
    ),
    sqlite_with_rowid=False,  # one tree to descend instead of two, 128 times a commit
)

# What the queue has served its owners within each priority: the tokens of runs that have ended, divided by
# the owners' weights. An owner's counter is the sum of `served` and the highest `start`, which is where it
# began to be counted. shard: as in `usage`.
queue_shares = Table(
    "queue_shares",
    metadata,
    Column("priority", Integer, primary_key=True, autoincrement=False),
    Column("owner", Text, primary_key=True),
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("served", Double, nullable=False),
    Column("start", Double, nullable=False),
    sqlite_with_rowid=False,
)

# The processes that carry runs on. A challenger takes the runs of one whose `beat` it has seen stand still.
# serves: a digest of the models that it serves, empty where it does not tell.
runners = Table(
    "runners",
    metadata,
    Column("id", Text, primary_key=True),
    Column("beat", BigInteger, nullable=False),
    Column("serves", Text, nullable=False, server_default=""),
)

# What came of a request with an `Idempotency-Key`. response_id: the run that it started. Elsewhere `runner`
# is at work on it until `status` is there, with the reply. about: the id of what the reply tells of; the
# reply goes with that (`kept_replies`). num_bytes: what the reply takes.
idempotency = Table(
    "idempotency",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("route", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("body_hash", LargeBinary, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("response_id", Text),
    Column("runner", Text),
    Column("status", Integer),
    Column("headers", LargeBinary),
    Column("body", LargeBinary),
    Column("about", Text),
    Column("num_bytes", BigInteger, nullable=False, server_default="0", info=HELD_BYTES),
    Index("idempotency_by_time", "created_at"),
    Index("idempotency_by_response", "response_id"),
    Index("idempotency_by_size", "owner", "num_bytes"),
    Index(
        "idempotency_by_object",
        "about",
        **_where("about IS NOT NULL"),
    ),
)

# event_types: those that it wants, with commas between. disabled_at: when its receiver said that it is gone.
webhooks = Table(
    "webhooks",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("secret", LargeBinary, nullable=False),
    Column("event_types", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("disabled_at", BigInteger),
    Index("webhooks_by_owner", "owner"),
)

# A notice that is still to reach its webhook: a row lives from the commit that it tells of to the 2xx, or
# until nobody tries any more. due_at moves ahead of each attempt, so that a row is in one process's hands.
deliveries = Table(
    "deliveries",
    metadata,
    Column("webhook_id", Text, primary_key=True),
    Column("event_id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("response_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("due_at", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Index("deliveries_by_time", "due_at"),
    Index("deliveries_by_webhook", "webhook_id", "due_at"),
    Index("deliveries_by_response", "response_id"),
)

# Tool outputs posted to a waiting run. Rows outlive the run, so that a repeated post is told apart from a
# contradicting one.
run_inputs = Table(
    "run_inputs",
    metadata,
    Column("response_id", Text, primary_key=True),
    Column("call_id", Text, primary_key=True),
    Column("item_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("body_hash", LargeBinary, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("private", LargeBinary),
)

# What was used, in sums: a row for each minute, and for all that usage is told apart by. start: of the
# minute; of the hour, where several minutes were put together. key_id: of the API key, empty without one.
# shard: a number of the process that counted, so that processes hardly ever wait for each other; HOURLY
# in rows of hours. cached_tokens are among input_tokens, reasoning_tokens among output_tokens.
HOURLY = -1
usage = Table(
    "usage",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("tier", Text, primary_key=True),
    Column("batch", Boolean, primary_key=True),
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("requests", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Index("usage_by_time", "start"),
    Index(  # what is to be put together in hours
        "usage_of_minutes",
        *("start", "owner"),
        **_where(f"shard <> {HOURLY}"),
    ),
    sqlite_with_rowid=False,
)

# The same by the hour for each person whom clients name, by a digest; it is among `usage`, too. Clients make
# names up as they like, so only so many persons of an owner have rows of one hour, and rows go with time.
person_usage = Table(
    "person_usage",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("person", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("tier", Text, primary_key=True),
    Column("batch", Boolean, primary_key=True),
    Column("shard", Integer, primary_key=True, autoincrement=False),
    Column("requests", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Index("person_usage_by_time", "start"),
    sqlite_with_rowid=False,
)

# The tenants. A row comes with an owner's first key; rows of data name their owner without it. limits: a JSON
# object that the server writes and reads. archived_at: since then it takes no keys.
owners = Table(
    "owners",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("archived_at", BigInteger),
    Column("limits", LargeBinary),
    Index("owners_by_time", "created_at", "id"),
)

# scopes: what the key may do, with commas between. last_used_at: written once in minutes, not with each use.
# replaces: the key whose successor it is. limits: as those of its owner, for this key alone.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("hint", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("revoked_at", BigInteger),
    Column("scopes", Text, nullable=False, server_default="all"),
    Column("expires_at", BigInteger),
    Column("last_used_at", BigInteger),
    Column("replaces", Text),
    Column("limits", LargeBinary),
    Index("api_keys_by_hash", "hash", unique=True),
    Index("api_keys_by_owner", "owner", "created_at", "id"),
)

# What was done to keys, owners, webhooks and the data of owners, one row each, never changed and never
# removed. number: from 1, without gaps. hash: over the row and the hash before it.
audit = Table(
    "audit",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("owner", Text),
    Column("details", LargeBinary, nullable=False),
    Column("request_id", Text),
    Column("ip", Text),
    Column("hash", LargeBinary, nullable=False),
    Index("audit_by_id", "id", unique=True),
    Index("audit_by_target", "target", "number"),
)

# One row: the last entry of the audit log. Whoever appends holds it until the commit, so that two processes
# never append at the same place.
audit_head = Table(
    "audit_head",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)

# One row, made by the migration that made the table: what tells this database from every other. id: 32 hex
# digits. Copies have the same, such as backups.
identity = Table(
    "identity",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False),
)

# How much of each rate limit is used up. id: whose limit it is, and which. arrival: when all that was taken
# will have come back, in nanoseconds since the epoch; in the past where nothing is used.
quota_state = Table(
    "quota_state",
    metadata,
    Column("id", Text, primary_key=True),
    Column("arrival", BigInteger, nullable=False),
)

# Keys that seal what clients keep for us. Numbers count up and the highest one seals; the others still open.
sealing_keys = Table(
    "sealing_keys",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("secret", LargeBinary, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)

# The latest transaction of each process that writes to a shared database; by it a writer whose connection
# broke during a COMMIT learns whether that took place. at: seconds, by the database's clock.
commits = Table(
    "commits",
    metadata,
    Column("writer", BigInteger, primary_key=True, autoincrement=False),
    Column("number", BigInteger, nullable=False),
    Column("at", BigInteger, nullable=False),
)

# Files that clients upload, or that the server makes for them. digest: of the content, a blob. num_bytes: its
# length. expires_at: from then on it is unknown; null where it stays until it is deleted.
files = Table(
    "files",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False, info=HELD_BYTES),
    Column("digest", Text, nullable=False, info=NAMES_BLOB),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Index("files_by_time", "owner", "created_at", "id"),
    Index("files_by_digest", "digest"),
    Index("files_by_expiry", "expires_at"),
    Index("files_by_size", "owner", "num_bytes"),
)

# Files that come in parts. num_bytes: of the whole file, as its client announced it. status: pending,
# completed or cancelled. file_lifetime: microseconds from the file's creation to its expiry. file_id: of the
# file that it became.
uploads = Table(
    "uploads",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("mime_type", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("file_lifetime", BigInteger),
    Column("file_id", Text),
    Index("uploads_by_owner", "owner"),
    Index("uploads_by_expiry", "expires_at"),
)

# Parts of pending uploads, each a blob.
upload_parts = Table(
    "upload_parts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("upload_id", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False, info=HELD_BYTES),
    Column("digest", Text, nullable=False, info=NAMES_BLOB),
    Column("created_at", BigInteger, nullable=False),
    Index("upload_parts_by_upload", "upload_id"),
    Index("upload_parts_by_size", "owner", "num_bytes"),
    Index("upload_parts_by_digest", "digest"),
)

# Where code of models runs. lifetime: microseconds from its last use to its expiry. version: raised by each
# change of its files or its session. cells: how many have run. state: the session as of the last cell, where
# the interpreter can tell it. num_bytes: of that.
containers = Table(
    "containers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("last_active_at", BigInteger, nullable=False),
    Column("lifetime", BigInteger, nullable=False),
    Column("memory_limit", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("cells", BigInteger, nullable=False),
    Column("state", LargeBinary),
    Column("num_bytes", BigInteger, nullable=False, info=HELD_BYTES),
    Column("given", Text, nullable=False, server_default=""),
    Index("containers_by_time", "owner", "created_at", "id"),
    Index("containers_by_use", "last_active_at"),
    Index("containers_by_size", "owner", "num_bytes"),
)

# The files of containers. path: below the container's folder. source: user or assistant.
container_files = Table(
    "container_files",
    metadata,
    Column("id", Text, primary_key=True),
    Column("container_id", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False, info=HELD_BYTES),
    Column("digest", Text, nullable=False, info=NAMES_BLOB),
    Column("created_at", BigInteger, nullable=False),
    Column("source", Text, nullable=False),
    Index("container_files_by_container", "container_id", "path", unique=True),
    Index("container_files_by_size", "owner", "num_bytes"),
    Index("container_files_by_digest", "digest"),
)

# Blobs: bytes by their SHA-256, on PostgreSQL. Where the database is a file, each blob is a file in a folder
# beside it, and these two tables are empty. content: which parts are its bytes, because parts are written
# before the digest is known. touched_at: when somebody last put the same bytes; seconds, by the database's
# clock. holds: how many have put them whose row may still be on its way; one more for each that was killed
# then. puts: how often they were put.
blobs = Table(
    "blobs",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("content", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("touched_at", BigInteger, nullable=False),
    Column("holds", BigInteger, nullable=False, server_default="0"),
    Column("puts", BigInteger, nullable=False, server_default="0"),
    Index("blobs_by_content", "content"),
)

# number: counts up from 0 within a content; every part but the last is 1 MiB.
blob_parts = Table(
    "blob_parts",
    metadata,
    Column("content", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
    Column("written_at", BigInteger, nullable=False),
)

# Stores of documents that can be searched. number: what the ids of its chunks begin with, never given twice.
# metadata: a JSON object. expires_after: microseconds after last_active_at. next_file: the number that its
# next file takes. embedding, dimensions: the model that its vectors are to be of; null where it has none.
# to_embed: some of its files have no vectors of that model yet. deleted_at: nobody sees it any more, and what
# is left of it goes in small steps.
vector_stores = Table(
    "vector_stores",
    metadata,
    Column("number", _COUNTED, primary_key=True),
    Column("id", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("name", Text, nullable=False),
    Column("description", Text),
    Column("metadata", LargeBinary, nullable=False),
    Column("expires_after", BigInteger),
    Column("last_active_at", BigInteger, nullable=False),
    Column("next_file", Integer, nullable=False),
    Column("embedding", Text),
    Column("dimensions", Integer),
    Column("deleted_at", BigInteger),
    Column("to_embed", Boolean, nullable=False, server_default=false()),
    Index("vector_stores_by_id", "id", unique=True),
    Index("vector_stores_by_time", "owner", "created_at", "id"),
    Index(
        "vector_stores_to_embed",
        "number",
        sqlite_where=text("to_embed = 1"),
        postgresql_where=text("to_embed"),
    ),
    Index(
        "vector_stores_expiring",
        *("last_active_at", "expires_after"),
        **_where("expires_after IS NOT NULL AND deleted_at IS NULL"),
    ),
    Index(
        "vector_stores_deleted",
        *("owner", "number"),
        **_where("deleted_at IS NOT NULL"),
    ),
    # Otherwise SQLite gives the number of the newest store again once that is gone, and whoever still reads a
    # file of it, or holds its vectors, would take the next store for it.
    sqlite_autoincrement=True,
)

# A file in a store, and the work of reading it. number: its own within the store, never given twice. status:
# in_progress, completed, failed or cancelled. attributes: a JSON object, or null; attribute_bytes: its
# length. chunk_tokens: of one chunk; chunk_overlap: those of them that are the end of the one before.
# num_bytes: of its chunks. runner: who works on it now; fence: of its latest claim; attempt: how often it was
# claimed and the work neither got anywhere nor ended by somebody's will; retry_at: it rests until then.
# next_position: the first chunk that is not stored yet, of the chunks with this digest. embedding: the model
# that the vectors of its first `embedded` chunks are of; all others have none, or those of a model that is
# gone. erasing: its chunks go, and it goes with them where it is deleted.
vector_store_files = Table(
    "vector_store_files",
    metadata,
    Column("store_number", BigInteger, primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("owner", Text, nullable=False),
    Column("store_id", Text, nullable=False),
    Column("file_id", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("batch_id", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("error_code", Text),
    Column("error_message", Text),
    Column("attributes", LargeBinary),
    Column("chunk_tokens", Integer, nullable=False),
    Column("chunk_overlap", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False, server_default="0", info=HELD_BYTES),
    Column("runner", Text),
    Column("fence", BigInteger, nullable=False, server_default="0"),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("next_position", Integer, nullable=False, server_default="0"),
    Column("digest", LargeBinary),
    Column("erasing", Boolean, nullable=False, server_default=false()),
    Column("deleted_at", BigInteger),
    Column("retry_at", BigInteger),
    Column("embedding", Text),
    Column("embedded", Integer, nullable=False, server_default="0"),
    Column("attribute_bytes", BigInteger, nullable=False, server_default="0", info=HELD_BYTES),
    Index(
        "vector_store_files_by_file",
        *("store_id", "file_id"),
        unique=True,
        **_where("deleted_at IS NULL"),
    ),
    Index("vector_store_files_by_size", "owner", "num_bytes", "attribute_bytes"),
    Index("vector_store_files_of_file", "file_id"),
    Index("vector_store_files_by_batch", "batch_id"),
    Index(
        "vector_store_files_to_read",
        *("owner", "created_at", "runner"),
        **_where("status = 'in_progress' AND deleted_at IS NULL"),
    ),
    Index(
        "vector_store_files_to_erase",
        "store_number",
        sqlite_where=text("erasing = 1"),
        postgresql_where=text("erasing"),
    ),
)

# Files that were put into a store together. cancelled_at: whatever of it was not read by then is cancelled.
# total: its files; added: how many of them were put into the store.
vector_store_batches = Table(
    "vector_store_batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("store_id", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("cancelled_at", BigInteger),
    Column("total", Integer, nullable=False, server_default="0"),
    Column("added", Integer, nullable=False, server_default="0"),
    Index("vector_store_batches_by_store", "store_id"),
    Index("vector_store_batches_of_owner", "owner"),
)

# Files of a batch that are still to be put into its store, as many in a row as one transaction puts there.
# files: a JSON list of [chunk_tokens, chunk_overlap, attributes or null, [[file_id, filename], ...]], so that
# what a request says once of all files is here once.
vector_store_slices = Table(
    "vector_store_slices",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("owner", Text, nullable=False),
    Column("num_files", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False, info=HELD_BYTES),
    Column("files", LargeBinary, nullable=False),
    Index("vector_store_slices_by_size", "owner", "num_bytes"),
)

# The pieces of files that a search finds. id: the numbers of store and file, and the position in the file, in
# one number (`storage.vector_stores.chunk_ids`). page: where it begins, counted from 1, null where a file has
# none. embedding: float32, little-endian, of the model that the row of the file names; null where there is
# none. breaks: a JSON list of where in the text other pages begin, each with its number; null where none
# does, and in rows older than the column. The index of their words is the table `vector_words`, which each
# database has in its own form and only `storage.vector_stores.words` knows.
vector_chunks = Table(
    "vector_chunks",
    metadata,
    Column("id", _COUNTED, primary_key=True, autoincrement=False),
    Column("owner", Text, nullable=False),
    Column("page", Integer),
    Column("text", Text, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("embedding", LargeBinary),
    Column("breaks", LargeBinary),
)

# Batches. key_id: of the key that made it, null without one. digest: of the input, which stays for as long as
# lines are read from it; null once the batch has ended. runner, fence: as of runs. num_bytes: of the results
# that its lines have and no file has yet. total: once its lines are stored. attempts: claims since the last
# one under which it got on; retry_at: until then it rests if the present claim comes to nothing.
# output_lifetime: microseconds that its files live; null: for ever.
batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("key_id", Text),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("digest", Text, info=NAMES_BLOB),
    Column("metadata", LargeBinary, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("in_progress_at", BigInteger),
    Column("cancelling_at", BigInteger),
    Column("finalizing_at", BigInteger),
    Column("ended_at", BigInteger),
    Column("output_lifetime", BigInteger),
    Column("errors", LargeBinary),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("model", Text),
    Column("usage", LargeBinary),
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False, info=HELD_BYTES),
    Column("runner", Text),
    Column("fence", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("claimed_at", BigInteger),
    Column("retry_at", BigInteger),
    Index("batches_by_owner", "owner", "created_at", "id"),
    Index("batches_by_digest", "digest"),
    Index("batches_by_size", "owner", "num_bytes"),
    Index(  # what is to be carried on
        "batches_open",
        *("owner", "created_at"),
        **_where("ended_at IS NULL"),
    ),
)

# The requests of batches that have not ended. position: the number of the line in the input, from 1. start,
# stop: its bytes there. result: the line of the output or error file, once it has one; ended_at orders them.
# used: what of a result the sums of its batch are made of, a JSON object; null where an earlier version wrote
# the result.
batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", Text, nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("stop", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("result", LargeBinary),
    Column("ended_at", BigInteger),
    Column("used", LargeBinary),
    Index("batch_lines_by_status", "batch_id", "status", "position"),
    Index("batch_lines_by_end", "batch_id", "status", "ended_at", "position"),
)

# Chat completions that their clients asked to be stored. body: the object that the client was given, without
# its metadata. metadata: a JSON object. messages: those of the request, a JSON array.
chat_completions = Table(
    "chat_completions",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("model", Text, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("messages", LargeBinary, nullable=False),
    Column("num_bytes", BigInteger, nullable=False, info=HELD_BYTES),
    Index("chat_completions_by_time", "owner", "created_at", "id"),
    Index("chat_completions_by_age", "created_at"),
    Index("chat_completions_by_size", "owner", "num_bytes"),
)

# The same metadata pair by pair, in UTF-8, for lists that ask for some of them.
chat_completion_metadata = Table(
    "chat_completion_metadata",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("completion_id", Text, primary_key=True),
    Column("key", LargeBinary, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

# Pairs of the metadata of responses and conversations that lists show; see `pairs`. created_at: that of the
# object. digest: of the pair, with the kind of the object.
metadata_pairs = Table(
    "metadata_pairs",
    metadata,
    Column("object_id", Text, primary_key=True),
    Column("digest", LargeBinary, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("metadata_pairs_by_time", "owner", "digest", "created_at", "object_id"),
)

# Prompt templates. default_version: what a request gets that names none. latest_version: the highest number
# that was given; none is given twice. metadata: a JSON object.
prompts = Table(
    "prompts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("name", Text),
    Column("metadata", LargeBinary, nullable=False),
    Column("default_version", Integer, nullable=False),
    Column("latest_version", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False, info=HELD_BYTES),
    Index("prompts_by_time", "owner", "created_at", "id"),
    Index("prompts_by_size", "owner", "num_bytes"),
)

# Versions of prompt templates, which never change. body: the template, a JSON object.
prompt_versions = Table(
    "prompt_versions",
    metadata,
    Column("prompt_id", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("num_bytes", BigInteger, nullable=False, info=HELD_BYTES),
    Index("prompt_versions_by_size", "owner", "num_bytes"),
)
