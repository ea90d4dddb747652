"""Bytes in the store: one seam around files, immutable blobs, exclusive creation, memo, intents, reports of runs."""
