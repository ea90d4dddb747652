"""A snapshot over HTTP: questions batched, a ref followed, and versions swapped while it serves."""
