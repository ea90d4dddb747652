"""Files that an index is built from and made of: vectors of any source, pieces between stages, faiss's own files."""
