"""What is told of a service: events, metrics, and the quality of what it gives."""
