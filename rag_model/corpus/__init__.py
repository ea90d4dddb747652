"""Turn dumps and documents into passages.

| module | contents |
| --- | --- |
| `plan` | `plan_dump`: find the format of a dump and divide it into parts |
| `parts` | boundaries of parts, and files that planning stages for workers |
| `dump_formats` | the dump formats, their protocol, registry and list |
| `articles` | `classify_page`: which pages are articles, in each language |
| `wikitext`, `markup` | `clean_wikitext`: wikitext to plain text by section |
| `chunkers` | the chunkers, their protocol and registry |
| `chunk` | `chunk_part`: chunk one part into a Parquet file of passages |
| `article_log` | reuse articles that an earlier build chunked in the same way |
| `salient_spans` | find spans of links and dates, and store them |
| `passages`, `passage_delta` | passage files, and deltas between them |
| `ragged_file` | files of token vectors and weighted terms |
| `redact` | remove pages from the files of a part |
| `dump_catalog` | find and fetch dumps of Wikimedia |
| `source` | read and decompress files behind any URL |
| `records` | pages, articles, passages, parts, plans; times of revisions |
"""
