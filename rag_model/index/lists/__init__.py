"""The kinds `ivf` and `exact`: inverted lists of codes, and plain vectors.

kind         `ListKind` and `ExactKind`: the stages of the build
training     centroids, rotation and codec
list_file    pieces of sorted codes, and faiss's file layout of lists
"""
