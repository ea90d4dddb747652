"""Objectives: the ways to train a model.

* `objective`: the protocol and the registry of objectives
* `dpr`, `ict`, `margin_mse`: train a bi-encoder
* `colbert`, `cross_encoder`: train a late-interaction model, or a reranker
* `sidr`, `openrag`: train learned sparse encoders
* `rag`, `end2end`, `ra_dit`: train question encoder and generator; `ra_dit_tasks` has the stages of
  RA-DIT
* `realm`: train a bi-encoder and a masked language model, which is in `realm_model`
* `task_bases`, `losses`: base classes and losses of several objectives
"""
