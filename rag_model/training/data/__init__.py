"""What is learned from: examples, hard negatives, and the snapshot as non-parametric memory."""
