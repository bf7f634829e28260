"""fxopt: capture PyTorch models as torch.fx graphs with their modules, and rewrite them reversibly."""
