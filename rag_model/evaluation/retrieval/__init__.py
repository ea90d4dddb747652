"""Evaluation of retrievers.

judging          search, match hits with relevance judgements, compute the measures
staged           the quality, time and bytes of each stage of a retriever
comparison       compare retrievers with the first one, in groups of questions; recommend one
"""
