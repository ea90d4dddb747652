"""Dump formats: recognize, plan and read the files of a dump.

| module | contents |
| --- | --- |
| `dump_format` | the protocol, the registry of accepted formats, and their detection |
| `page_format` | base class of formats whose files contain pages of a wiki |
| `record_format` | base class of formats whose files contain documents or passages |
| `document_files` | folders of documents; base class of formats with one document per file |
| `mediawiki`, `page_lines`, `wiki_site` | wikis: XML dumps, pages as JSON lines, a running site |
| `jsonl`, `parquet`, `tsv` | many documents per file; `jsonl` also reads KILT and HotpotQA |
| `markup_files`, `source_code`, `office`, `pdf`, `pdf_tables` | one document per file |
"""
