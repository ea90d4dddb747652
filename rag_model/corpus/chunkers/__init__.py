"""Chunkers: split an article into passages.

chunker.Chunker              -> the protocol and its contract: what a passage is, its bounds, and determinism
registry.build_chunker(name) -> the chunker of a recipe, built in or found through an entry point
files.named_files(chunker)   -> the files that settings name, and their identity in a memo key
words, running               -> the words of an article, and how strong the boundary before each is
windows, sentences, recursive, tokens -> the built-in chunkers; `semantic` lies in `rag_model.encoders`

"""
