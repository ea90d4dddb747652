"""The quality of an index.

results    records of measurements: recall, operating points, health, fit, tuning, resources
sweep      recall against work over a range of search settings
health     statistics of an index file (links, lists, quantisation error); fit of a reused trained file
tune       search settings for a recall target, and the evaluation of a new index
"""
