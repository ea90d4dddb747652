"""Questions in, ranked and credited passages out; one `Retriever` protocol, one file a kind of retrieval."""
