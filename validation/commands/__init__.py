"""The commands of `fxopt` that belong to the harness."""
