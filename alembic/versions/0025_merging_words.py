"""SQLite's index of words leaves merging to the server.

FTS5 merged what transactions had added while it committed, whatever else was at work. Why the server does it,
and when, stands in `storage.vector_stores.words`; this file never changes again.
"""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        # Segments of one size that FTS5 still merges by itself, all at once: the server is long before it.
        for name, value in (("automerge", 0), ("crisismerge", 1000)):
            op.execute(f"INSERT INTO vector_words (vector_words, rank) VALUES ('{name}', {value})")
