"""Evaluation of a model's answers.

examination      answer every question under every condition; cached answers; other retrievers
ablation         conditions (open book, closed book, gold passage, ...) and the benefit of retrieval
readings         the record of one answer with its passages
scores           the measures of each kind of answer, of citations and of the use of passages
abstaining       risk-coverage curves, and the choice of a threshold for abstention
routing          the reader `auto`, and the choice of its route
collapse         detection of retrieval collapse
settings         the settings of an evaluation
"""
