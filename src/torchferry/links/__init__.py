"""How bytes get from one process to another. Thin: no policy, no retries, no order of their own."""
