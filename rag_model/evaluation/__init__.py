"""Evaluation of retrieval and of answers.

questions        read question files and BEIR folders; sample questions from passages
matching         match gold answers in texts
measures         the measures of answers and of retrieval
retrieval        relevance judgements; retrievers measured stage by stage and compared
answers          a model's answers measured under several conditions
bootstrap        confidence intervals
gate             the checks before a ref moves to a snapshot or a release
records          stored values of each question, and comparisons of evaluations
subject          the identity of an evaluation
reports          HTML pages, and results in the formats of other tools
"""
