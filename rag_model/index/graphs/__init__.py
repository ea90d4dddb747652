"""HNSW graphs: cells, one graph a cell, links across their borders, the merge into one file, reachability."""
