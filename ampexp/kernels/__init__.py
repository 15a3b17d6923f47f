"""Low-precision arithmetic on processors that have none."""
