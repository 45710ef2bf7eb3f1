"""The supervised stages, fine-tuning and reward training, by TRL's trainers."""
