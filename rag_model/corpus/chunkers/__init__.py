"""Chunkers: split an article into passages.

chunker.Chunker              -> the protocol and its contract: what a passage is, its bounds, and determinism
registry.build_chunker(name) -> the chunker of a recipe, built in or found through an entry point
files.named_files(chunker)   -> the files that settings name, and their identity in a memo key
windows                      -> the built-in chunkers `words` and `sections`

"""
