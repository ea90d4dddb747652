"""Copies of versions outside the store.

* `pull`: copy a version to a local folder; `folder`: paths and locks of such a folder, and deletion
  of old snapshots
* `materialize`: fetch, patch, rebuild or derive the files of a pull
* `overlap`: vectors that a previous snapshot also has; `deltas`, `delta_files`: differences of
  files
* `export`: write a version in another layout to a folder or to the Hub
"""
