"""How gradients reach the layers: by autograd, by BackPACK, or by ASDL."""
