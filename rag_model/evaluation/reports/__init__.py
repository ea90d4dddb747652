"""Report pages, and results in the formats of other tools.

answers          the page of a model's answers
retrieval        the page of retrievers
build            the page of a build
training         the page of a training
reproduction     the table of a reproduction
page             inline SVG charts, and the HTML elements that all pages share
run_files        TREC runs, DPR's and KILT's JSON, JSONL
"""
