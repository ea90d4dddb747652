"""Chunkers: split an article into passages.

| module | contents |
| --- | --- |
| `chunker` | the protocol and its contract, the registry, files of settings, `build_passage` |
| `article_words` | words, ends of sentences, and the boundaries at which an article may be split |
| `windows` | the chunkers `words`, `sections`, `sentences` and `recursive` |
| `tokens` | the chunker `tokens`; `semantic` is in `rag_model.encoders` |
"""
