"""Searchable structures over a snapshot's representations, each of a kind, each built in four stages.

`kind.py` defines the kind protocol; `registry.py` finds the kinds: `graphs/` (HNSW), `lists/` (inverted lists),
`exact/`, and those of installed packages. `files/`, `quality/` and `sizing/` hold code that the kinds over vectors
share.

registry.kind_for("HNSW32"), registry.kind_of(entry)    -> the kind of a recipe's factory, or of a manifest's entry
recipe.resolve(IndexRecipe("HNSW32"), n, d)    -> VectorPlan: every number chosen
build.build_index(vectors, path, IndexRecipe("HNSW32"))    -> the index file, in one call; stages.build for any kind
search.open_index(path), exact.scan.ExactIndex(vector files)    -> .search(vectors, k)
quality.health.sweep(index, Trial.of(exact, …))    -> recall against effort; quality.health.examine(path) -> its parts
quality.curve.compare(curve, reference)    -> the largest shortfall in recall at equal distance computations
quality.tune.tune(index, trial, 0.95)    -> the smallest efSearch or nprobe that reaches this recall
"""
