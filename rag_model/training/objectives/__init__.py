"""What is learned: one file an objective."""
