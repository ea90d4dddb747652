"""Retrieve passages for queries, ranked and with their credit lines; `factory.open_retriever` opens
a retriever.

* `hits`, `attribution`: hits, and the credit that must be shown with them
* `retriever`: the base class of all retrievers, and the timing of their stages
* `expression`, `factory`: parse retriever expressions; build and open their retrievers
* `context`: the resources of a retriever: indexes, vectors and models
* `dense`: retrievers over one index; inner products for the hits of other retrievers
* `where`: filters of passages by their metadata
* `fusion`, `rerank`: combine or rerank the hits of other retrievers
* `indexes`, `models`: indexes and models by name
"""
