"""Training: one explicit loop, one small file a recipe."""
