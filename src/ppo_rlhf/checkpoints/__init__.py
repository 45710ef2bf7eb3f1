"""What a run leaves on disk, whole at any moment: training state, models, and what resuming it may change."""
