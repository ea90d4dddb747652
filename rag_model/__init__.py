"""All computations of bookwheel, without Prefect and Beam. This file imports no other module.

| to | use, below `rag_model` |
| --- | --- |
| open a store or a snapshot | `store.Store.open`, `store.Snapshot.open` and `.from_folder` |
| search | `retrieve.factory.open_retriever`; by vector `retrieve.dense.DenseRetriever` |
| ask a running service over HTTP | `client.Client` |
| search from LangChain, LlamaIndex or Haystack | `integrations` |
| answer questions | `reading.model.open_reader`; with your own model `reading.concat.ConcatReader` |
| turn texts into vectors | `encoders.encoder.Encoder.load` |
| build an index | `index.recipe.resolve`, `index.build.run_stages`, `index.search.open_index` |
| read and chunk a dump | `corpus.plan.plan_dump`, `corpus.wikitext.clean`, `corpus.chunk.chunk_part` |
| train a model, or add an objective | `training.objectives.objective` |
| measure retrieval | `evaluation.questions.read_questions`, `evaluation.retrieval` |
| estimate the resources of a run | `resources` |

Imports go only from left to right: `snapshots`, `evaluation`, `retrieve`, then `store`, `index` and
`encoders`, which do not import each other, then `corpus`. `lint-imports` checks it. The classes of
all errors are in `errors`.
"""
