"""Inverted indexes: for each term the passages that have it, with a weight (BM25 and learned sparse
retrieval).

* `base_kind`, `kind` (BM25), `impact` (learned weights): the index kinds
* `analyzer`, `lucene_analyzer`, `counting`, `part`: from passages to the postings of a part
* `merge`, `file`, `dictionary`, `lists`, `packing`: from parts to the index file, and its byte
  format
* `derive`, `carry`: derive the index file of a snapshot from a previous snapshot's file
* `search`, `decoded_search`, `selective_search`, `maxscore`: exact top-k search
"""
