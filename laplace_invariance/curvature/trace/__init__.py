"""What a forward pass leaves behind: the calls of layers, their parameters and gradients."""
