"""Copies of versions outside the store.

* `pull`: copy a version to a local folder; `folder`: paths, locks and pruning of such a folder
* `materialize`: fetch, patch, rebuild or derive the files of a pull
* `overlap`: vectors that a previous snapshot has too; `deltas`, `delta_files`: differences of files
* `export`: write a version in another layout to a folder or to the Hub
"""
