"""The report of a run: its charts, page and wording, and the token view of sample responses."""
