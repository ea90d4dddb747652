"""Objectives: the ways to train a model.

* `objective`: the protocol and the registry
* `dpr`, `ict`, `margin_mse`: bi-encoders
* `colbert`, `cross_encoder`: late interaction, and rerankers
* `sidr`, `openrag`: learned sparse encoders
* `rag`, `end2end`, `ra_dit`: question encoder and generator; `ra_dit_tasks` has the stages of
  RA-DIT
* `realm`: a bi-encoder and a masked language model; `realm_model` has the model and its masking
* `task_bases`, `losses`: parts that objectives share
"""
