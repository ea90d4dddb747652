"""Exact search: every vector is compared."""
