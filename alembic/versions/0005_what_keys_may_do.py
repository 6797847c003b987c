"""What an API key may do and for how long, the owners as rows of their own, and the audit log.

Revision 0005, after 0004. What each table is for stands in `storage.tables`; this file never changes again.
A key that was made before may do everything but administer: its scope is `all`.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Integer, LargeBinary
from sqlalchemy import Text as AnyText

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

Text = AnyText().with_variant(AnyText(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "owners",
        Column("id", Text, primary_key=True),
        Column("name", Text, nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("archived_at", BigInteger),
        Column("limits", LargeBinary),
    )
    op.create_index("owners_by_time", "owners", ["created_at", "id"])
    op.execute(
        "INSERT INTO owners (id, name, created_at)"
        " SELECT owner, owner, min(created_at) FROM api_keys GROUP BY owner"
    )

    op.add_column("api_keys", Column("scopes", Text, nullable=False, server_default="all"))
    op.add_column("api_keys", Column("expires_at", BigInteger))
    op.add_column("api_keys", Column("last_used_at", BigInteger))
    op.add_column("api_keys", Column("replaces", Text))
    op.add_column("api_keys", Column("limits", LargeBinary))
    op.create_index("api_keys_by_owner", "api_keys", ["owner", "created_at", "id"])

    op.create_table(
        "audit",
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
    )
    op.create_index("audit_by_id", "audit", ["id"], unique=True)
    op.create_index("audit_by_target", "audit", ["target", "number"])
    op.create_table(
        "audit_head",
        Column("one", Integer, primary_key=True, autoincrement=False),
        Column("number", BigInteger, nullable=False),
        Column("hash", LargeBinary, nullable=False),
    )
