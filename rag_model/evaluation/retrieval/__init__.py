"""Retrievers measured: what they find, how it is judged, what each stage finds and costs, and which one to take."""
