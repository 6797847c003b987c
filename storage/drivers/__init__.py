"""The databases: SQLite and PostgreSQL behind one interface, the writing thread and the reading threads."""
