"""What is asked: question files, questions drawn from a snapshot, and what counts as an answer."""
