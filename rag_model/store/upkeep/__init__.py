"""Maintenance of a store: expire, retire, collect garbage, verify."""
