"""The resources that a run needs, estimated from sizes before the run starts."""
