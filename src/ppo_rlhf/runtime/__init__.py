"""The environment of a run: processes, signals, locks, files, paths and terminal."""
