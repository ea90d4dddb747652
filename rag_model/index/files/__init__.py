"""Input and output files of an index build: vectors of any source, pieces between stages, faiss's own files."""
