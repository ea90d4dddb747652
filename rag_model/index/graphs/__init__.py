"""The kind `hnsw`: one HNSW graph, built by cells and stitched.

kind          `GraphKind`: the stages of the build
cells         partition of the corpus into cells, and the pieces of parts sorted by cell
graph         arrays of a graph: links, levels, slots
stitch        links across the borders of cells, and the candidates for the merged graph
reach         links to nodes that a search cannot reach
update        a cell's graph, updated from the previous one
history       the changes of a cell's graph since it was built, and when it is built again
graph_file    faiss's file layout of a graph
"""
