"""The pipelines, one package each: `nodes.py` what they do, `pipeline.py` how it is wired."""
