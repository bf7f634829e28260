"""Changes between two runs and over many runs, and the noise of each metric."""
