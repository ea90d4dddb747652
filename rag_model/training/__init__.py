"""Training of encoders, rerankers and RAG models on a snapshot.

* `finetuning`: run one fine-tuning from end to end and record it in the memo; estimate its
  resources and write its model card
* `origins`: choose the initial models of a fine-tuning
* `objectives`: the protocol of objectives, the registry, and one module per built-in objective
* `data`: examples, hard negatives, teacher scores, and the snapshot as non-parametric memory
* `loop`: the training loop, its checkpoints and its log
* `moving_index`: rebuild an index while its passage encoder is trained
* `checkpoint_uploads`: upload checkpoints to the store, for a run on another machine
* `settings`: parse the settings of an objective, and write them as a commented TOML file
"""
