"""Evaluation of retrieval and of answers.

questions        read question files and BEIR folders; sample questions from passages
matching         find gold answers in texts
measures         the measures of answers and of retrieval
retrieval        relevance judgements; measure and compare retrievers stage by stage
answers          measure a model's answers under several conditions
bootstrap        confidence intervals
gate             the checks before a ref moves to a snapshot or a release
records          stored values per question, and comparisons of evaluations
subject          all inputs and settings of an evaluation, from which its id is computed
reports          HTML pages, and results in the formats of other tools
"""
