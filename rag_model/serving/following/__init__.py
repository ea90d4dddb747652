"""From a ref to what is served: follow the ref, and change the edition."""
