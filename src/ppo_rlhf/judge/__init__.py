"""A language model as judge: its settings, the requests, its answers."""
