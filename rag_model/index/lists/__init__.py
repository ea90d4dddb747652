"""Inverted lists: training, the codes of a part, the merge into one file."""
