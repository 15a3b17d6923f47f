"""The config groups, as a package so that they travel inside the wheel."""
