"""Follow a ref or a folder, and swap to each new version.

| module | content |
| --- | --- |
| `follower` | polling, pulling, refusals, the swap |
| `snapshot_slot` | the current snapshot and its readers |
| `trials` | trials of indexes and models in child processes |
"""
