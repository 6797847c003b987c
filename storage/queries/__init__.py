"""The statements, one module a subject; each function runs inside a transaction that its caller holds."""
