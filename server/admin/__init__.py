"""The operator's way to the database, with or without a running server."""
