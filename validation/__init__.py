"""The harness: proves and measures fxopt over a zoo of models."""
