"""Training data.

* `examples`: read training examples from common file formats
* `negatives`: mine hard negatives and missing positives
* `batches`: batches with in-batch negatives, and lists
* `blocks`: score data with a model on workers, block by block
* `pair_scores`: a teacher's scores of question-passage pairs
* `answer_scores`: a generator's log-likelihood of answers
* `judging`: a generator's verdicts on passages, and OpenRAG's pools
* `memory`: retrieve passages with their vectors, and rerank candidates
* `temporary_index`: search words or bags of tokens of a snapshot without such an index
* `passage_lists`: retrieve the passages of examples once
* `texts`: train on the snapshot's own text
"""
