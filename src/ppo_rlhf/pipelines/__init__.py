"""The pipelines, one package each: `nodes.py` has the node functions, `pipeline.py` connects the nodes."""
