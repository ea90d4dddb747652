"""RA-DIT: a language model learns to read what is found, then a retriever learns what helps it."""
