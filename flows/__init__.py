"""Orchestration: Prefect flows and the `bookwheel` command line. No algorithm and no DoFn is in this package."""

from rag_model.allocator import plain_arrow

plain_arrow()
