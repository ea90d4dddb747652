"""Bytes in the store: file operations, immutable blobs, exclusive creation, memo, intents, reports of runs."""
