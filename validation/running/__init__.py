"""A run: cases in processes of this machine or on a cluster, and their stored results."""
