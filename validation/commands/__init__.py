"""The commands of `fxopt` that are of the harness."""
