"""Evaluation of retrieval and of answers: the questions, what is measured, the reports, and the gate of a snapshot."""
