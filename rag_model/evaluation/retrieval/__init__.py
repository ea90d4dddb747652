"""Evaluation of retrievers.

judging          search, match hits with relevance judgements, compute the measures
staged           the measures, times and bytes of each stage of a retriever
comparison       compare retrievers with the first one, by groups of questions; recommend one
"""
