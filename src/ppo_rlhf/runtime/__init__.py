"""One run's processes, signals, locks, files, paths and terminal."""
