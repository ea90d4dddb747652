"""Dump formats: recognize, plan and read the files of a dump.

| module | contents |
| --- | --- |
| `dump_format` | the protocol, the registry with the list of accepted dumps, and the detection |
| `page_format` | base class of formats with pages of a wiki |
| `record_format` | base class of formats with documents or passages |
| `document_files` | folders, and the base class of formats with a document a file |
| `mediawiki`, `page_lines`, `wiki_site` | formats of a wiki: XML dumps, pages as JSON lines, a running site |
| `jsonl`, `parquet`, `tsv` | formats of one file with many documents; `jsonl` also has KILT and HotpotQA |
| `markup_files`, `source_code`, `office`, `pdf`, `pdf_tables` | formats with a document a file |
"""
