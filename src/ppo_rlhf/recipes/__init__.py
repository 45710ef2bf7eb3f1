"""What recipes of conf name: rewards, environments and the preparation of their tables."""
