"""Report pages, and results in the formats of other tools.

answers          the page about a model's answers
retrieval        the page about retrievers
build            the page about a build of a snapshot
training         the page about a training
reproduction     the table that compares published with measured values
page             inline SVG charts, and the HTML elements that all pages share
run_files        TREC runs, JSON files of DPR and KILT, JSONL
"""
