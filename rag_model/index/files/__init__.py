"""Files of an index build.

engine     the interface to faiss, on CPU and GPU
layout     checks of downloaded faiss files
vectors    the corpus's vectors as one matrix on disk
intake     input vectors of other programs: inspection, and splitting into parts
pieces     the files between build stages, and the slices of shards
tensors    safetensors files, written as a stream
"""
