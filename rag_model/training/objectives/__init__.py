"""The objectives: `dpr`, `rag-sequence`, `rag-token`, parts for others, and the registry."""
