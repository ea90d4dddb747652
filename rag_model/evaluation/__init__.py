"""How good retrieval, indexes and answers are: questions, matches, measures, ablations, gate, run files, reports."""
