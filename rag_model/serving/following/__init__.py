"""Follow a ref or a folder: serve each new version in place of the previous one.

| module | content |
| --- | --- |
| `follower` | polling, pulling, refusals, the swap |
| `snapshot_slot` | the current snapshot and its readers |
| `trials` | trials of indexes and models in child processes |
"""
