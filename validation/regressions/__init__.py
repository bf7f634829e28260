"""Changes between two runs and over many, and what is noise in which metric."""
