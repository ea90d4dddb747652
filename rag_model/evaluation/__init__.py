"""Evaluation of retrieval, indexes and answers: questions, matches, measures, ablations, gate, run files, reports."""
