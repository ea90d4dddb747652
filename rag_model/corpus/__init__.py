"""Turn dumps and documents into passages.

plan.plan_dump(pattern, …)          -> Plan: parts that are read independently, each with its byte ranges
dump.read_pages(part)               -> pages, in the dump's order
wikitext.clean(text, siteinfo)      -> sections of text as a reader sees it
chunkers.build_chunker(name, …)      -> article to passages
chunk.chunk_part(part, …, out)      -> all of it for one part: a Parquet file of passages
lineage.Inheritance(earlier parts)  -> articles that were chunked the same way before, and are not parsed again
"""
