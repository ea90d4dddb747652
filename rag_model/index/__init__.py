"""Searchable structures over a snapshot's vectors, each built in three stages: train, shard, merge.

recipe.resolve(IndexRecipe("HNSW32"), n, d)    -> IndexPlan: every number chosen
structure.structure_of(plan).train / .shard / .merge, or structure.build for all of them here
search.open_index(path), exact.ExactIndex(vector files)    -> .search(vectors, k)
health.sweep(index, Trial.of(exact, …))    -> recall against effort
"""
