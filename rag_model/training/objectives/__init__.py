"""The objectives: `dpr`, `rag-sequence`, `rag-token`, what others are made of, and the registry that finds them."""
