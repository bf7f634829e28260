"""A run: cases in processes of this machine or on a cluster, and what is kept of them."""
