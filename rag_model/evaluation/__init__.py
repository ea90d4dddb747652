"""How good retrieval and indexes are: questions, matches, measures, gate, run files, build report."""
