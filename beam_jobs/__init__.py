"""Where work runs in parallel: Beam pipelines over descriptors of parts and shards. Knows nothing of Prefect."""

import logging

# Beam warns at import that a Google client library, which nothing here uses, is absent.
logging.getLogger().addFilter(lambda record: not record.getMessage().startswith("apitools not found"))
