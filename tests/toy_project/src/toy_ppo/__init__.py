"""A toy of the project."""
