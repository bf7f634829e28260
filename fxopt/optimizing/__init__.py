"""`optimize`: the one call that captures a model, picks passes and kernels for it, and checks what it made."""
