"""What a forward pass leaves behind: calls of layers, which parameters they explain, and their gradients."""
