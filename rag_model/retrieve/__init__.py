"""Retrieval: queries in, ranked and credited passages out. `factory.open_retriever` opens a
retriever.

* `hits`, `attribution`: hits, and the credit that must be shown with them
* `retriever`: the base of all retrievers, and their measurement stage by stage
* `expression`: parses retriever expressions; `factory` builds and opens their retrievers
* `context`: the needs of a retriever, and the indexes, vectors and models that it reads
* `dense`: retrievers of one index; inner products for others
* `where`: filters of passages by their metadata
* `fusion`, `rerank`: combine or rerank the hits of other retrievers
* `indexes`, `models`: indexes and models by name
"""
