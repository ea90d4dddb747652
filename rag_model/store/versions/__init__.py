"""Versions in a store: manifests, snapshots, models, the refs that name them, and takedowns of pages."""
