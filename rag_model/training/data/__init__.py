"""Training data: examples, hard negatives, and the snapshot as non-parametric memory."""
