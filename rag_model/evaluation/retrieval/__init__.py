"""Evaluation of retrievers.

judging          search, match the hits with the relevance judgements, compute the measures
staged           the measures, times and bytes of each stage of a retriever
comparison       retrievers compared with the first one, by groups of questions; the recommended one
"""
