"""Dump formats: recognize, plan and read the files of a dump.

| module | contents |
| --- | --- |
| `dump_format` | the protocol, the registry with the list of accepted dumps, and the detection |
| `page_format` | base class of formats with pages of a wiki |
| `record_format` | base class of formats with documents or passages |
| `document_files` | folders, and the base class of formats with a document a file |
| `mediawiki`, `jsonl`, `parquet`, `tsv` | formats of one file with many documents, or of a wiki |
| `markup_files`, `source_code`, `pdf` | formats with a document a file |
"""
