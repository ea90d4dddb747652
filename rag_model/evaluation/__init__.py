"""How good retrieval and indexes are: questions, matches, measures, the gate, run files and the build report."""
