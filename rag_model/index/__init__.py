"""Indexes over a snapshot's representations: build, search, measure and tune them.

kind            the protocols of an index kind, and the registry: `get_kind`, `get_kind_for_factory`
recipe          `IndexRecipe`, and `resolve`, which chooses every number of a `VectorPlan`
plan            `IndexPlan`, the record that workers receive
factory         faiss factory strings
build           `build_index` from vectors in one call; `run_stages` for a plan of any kind
search          `open_index`: search a faiss file
exact_search    `ExactIndex`: exhaustive search of vector files; `rerank`
estimate        memory and disk of an index, and a recipe that fits into memory
vector_kind     base class of the kinds over vectors
graphs/         the kind `hnsw`
lists/          the kinds `ivf` and `exact`
postings/       the kinds `bm25` and `impact`
tokens/         the kind `tokens`
files/          files of a build: vectors, pieces, faiss's layouts
quality/        recall, sweeps, health, fit and tuning
"""
