"""HNSW graphs: cells, one graph per cell, links across their borders, the merge into one file, reachability."""
