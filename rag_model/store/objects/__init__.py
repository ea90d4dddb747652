"""Bytes in the store.

* `files`: file operations below one URL, including exclusive creation
* `blobs`: immutable files by digest; `cache`: local copies of blobs, stamps of files
* `memo`: records of stages' outputs; `intents`: announcements of running writers
* `buckets`: the base of cloud file systems; `s3`, `gcs`, `azure`, `hub`: one cloud each
"""
