"""Evaluation of a model's answers.

examination      answer every question under every condition, and cache the answers
ablation         conditions (open book, closed book, gold passage, ...) and the benefit of retrieval
readings         the record of one answer with its passages
scores           measures of answers and of citations, and whether answers come from the passages
abstaining       risk-coverage curves, and the choice of a threshold for abstention
routing          measure the reader `auto`, and choose when it retrieves
collapse         detection of retrieval collapse
settings         the settings of an evaluation
"""
