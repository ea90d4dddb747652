"""Copies outside the store: pull and export, patches from earlier vectors, stamps of verified files, pruning."""
