"""Searchable structures over a snapshot's vectors, each built in four stages: train, scatter, shard, merge.

recipe.resolve(IndexRecipe("HNSW32"), n, d)    -> IndexPlan: every number chosen
build.build_index(vectors, path, IndexRecipe("HNSW32"))    -> the index file, in one call
structure.structure_of(plan).train / .scatter / .shard / .merge, or structure.build for all of them here
search.open_index(path), exact.ExactIndex(vector files)    -> .search(vectors, k)
health.sweep(index, Trial.of(exact, …))    -> recall against effort; health.examine(path) -> what the file is made of
curve.compare(curve, reference)    -> the largest shortfall in recall at equal distance computations
tune.tune(index, trial, 0.95)    -> the smallest efSearch or nprobe that finds so much
"""
