"""End-to-end RAG: retriever and reader learn together beside a moving index."""
