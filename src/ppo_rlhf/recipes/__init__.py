"""Python functions that the recipes in conf/ refer to: rewards, environments and preparation of tables."""
