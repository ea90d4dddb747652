"""Training data.

* `examples`: read training examples from common file formats
* `negatives`: mine hard negatives and missing positives
* `batches`: batches with in-batch negatives, and batches of lists of passages
* `blocks`: score data with a model on workers, block by block
* `pair_scores`: score question-passage pairs with a teacher
* `answer_scores`: compute the log-likelihood of answers with a generator
* `judging`: judge with a generator whether passages help, and build OpenRAG's pools
* `memory`: retrieve passages with their vectors, and rerank candidates
* `temporary_index`: build an index for the training if the snapshot has none of its kind
* `passage_lists`: retrieve the passages of all examples before the training
* `texts`: sample training data from the snapshot's own passages
"""
