"""Postings: for each term the passages that hold it, with a weight. BM25 and learned sparse retrieval search them."""
