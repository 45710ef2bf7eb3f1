"""What a run writes to disk: checkpoints, models, model cards and records. A kill leaves no half-written checkpoint."""
