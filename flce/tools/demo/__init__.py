"""What `flce demo` is made of: the text, the training of two models, and what is told of them."""
