"""OpenRAG: a SiDR learns what helps a frozen generator."""
