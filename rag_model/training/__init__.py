"""Training of encoders, rerankers and RAG models on a snapshot.

* `finetuning`: one fine-tuning from end to end, recorded in the memo, with its resource estimate
  and model card
* `origins`: the initial models of a fine-tuning
* `objectives`: the protocol of objectives, its registry, and one module per built-in objective
* `data`: examples, hard negatives, teacher scores, and the snapshot as non-parametric memory
* `loop`: the training loop with checkpoints and the journal
* `moving_index`: an index that is rebuilt while its passage encoder is trained
* `checkpoint_uploads`: checkpoints in the store, for a run on another machine
* `settings`: the settings of an objective: from tables, and as a commented TOML file
"""
