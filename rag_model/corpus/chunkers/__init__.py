"""Chunkers: an article becomes passages.

chunker.Chunker              -> the protocol and its contract: what a passage is, what bounds it, what has to repeat
registry.build_chunker(name) -> the chunker of a recipe, built in or found through an entry point
files.named_files(chunker)   -> the files that settings name, and what they count as in a key
windows                      -> `words` and `sections`, today's
"""
