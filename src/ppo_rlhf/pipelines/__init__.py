"""The pipelines, one package for each pipeline: `nodes.py` has the node functions, `pipeline.py` connects the nodes."""
