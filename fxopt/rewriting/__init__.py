"""The contract of transformations: how they change a graph module, are undone, chained and verified."""
