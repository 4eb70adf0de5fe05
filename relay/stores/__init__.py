"""Stores: one protocol (`base`), one contract suite, SQLite behind it today."""
